"""A run that is saved by two ranks in stage 2 with states in 8 bits, goes on on three in stage 3 with states in full
precision, and then in one process: nothing is lost or changed on the way. Another one, with parameters in 8 bits, dropout
and a schedule, goes on on as many ranks as if it had not been restarted."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks, once, place
from test_sharding import load
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import memopt_compile as memopt


def made(bits):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 96, bias=False))
    return model, memopt.optim.Adam(model.parameters(), lr=0.01, state_bits=bits)


def values(model, opt):
    """Of parameters, and of the state as checkpoints have it."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    for number, state in opt.state_dict()["state"].items():
        found |= {f"{number}.{key}": whole(value) for key, value in state.items()}
    return found


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def in_low_precision(seed):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 160), nn.BatchNorm1d(160), nn.Dropout(0.2), nn.Linear(160, 64))
    memopt.quantize_parameters_(model, bits=8, group_size=512)
    opt = memopt.optim.AdamW(model.parameters(), lr=0.01, state_bits=8)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3)


def of_this_rank(model):
    return {"random": torch.get_rng_state(), "buffers": {name: b.clone() for name, b in model.named_buffers()},
            "draws": {name: p.to_local().draws.clone() for name, p in model.named_parameters()}}


def restarted(rank, ranks, folder):
    """What two steps behind a save come to, and what they come to in a run that begins with it."""
    saved, first = begun_or_resumed(rank, ranks, folder, save)
    _, second = begun_or_resumed(rank, ranks, folder, checkpoint.load)
    return saved, first, second


def begun_or_resumed(rank, ranks, folder, how):
    model, opt, schedule = in_low_precision(seed=how is save)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=2)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    run, losses = memopt.compile(step, zero=2, lowering="eager"), []
    batches = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(rank))

    def go(some):
        for x in some:
            losses.append(run(x))
            schedule.step()

    torch.manual_seed(5 + rank)
    if how is save:
        go(batches[:2])
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt)))
    state |= {"schedule": schedule.state_dict(), f"rank {rank}": of_this_rank(model)}
    how(state, checkpoint_id=folder + "/low")
    weights = {name: whole(value) for name, value in state["model"].items()}
    if how is not save:
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        mine = state[f"rank {rank}"]
        torch.set_rng_state(mine["random"])
        model.load_state_dict(mine["buffers"], strict=False)
        for name, p in model.named_parameters():
            p.to_local().draws.copy_(mine["draws"][name])
    go(batches[2:])
    return weights, [*losses[-2:], *values(model, opt).values(), *model.buffers(), torch.get_rng_state(),
                     torch.tensor(schedule.get_last_lr())]


def of_two(rank, ranks, folder):
    model, opt = made(8)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=2)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    run, generator = memopt.compile(step, zero=2, lowering="eager"), torch.Generator().manual_seed(rank)
    for _ in range(2):
        run(torch.randn(8, 64, generator=generator))
    save(dict(zip(("model", "optimizer"), get_state_dict(model, opt))), checkpoint_id=folder + "/of two")
    bits = {value.dtype for state in opt.state.values() for value in state.values() if torch.is_tensor(value)}
    found = values(model, opt)
    x, losses = torch.ones(8, 64), []
    for _ in range(2):
        losses.append(run(x))
        checkpoint.load({"model": model.state_dict()}, checkpoint_id=folder + "/of two")
    return found, torch.uint8 in bits, losses, restarted(rank, ranks, folder)


def of_three(rank, ranks, folder):
    model, opt = made(32)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=3)
    load(model, opt, folder + "/of two")
    save(dict(zip(("model", "optimizer"), get_state_dict(model, opt))), checkpoint_id=folder + "/of three")
    return values(model, opt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(place(tmp_path_factory) / "checkpoints")


@pytest.fixture(scope="module")
def two(tmp_path_factory, folder):
    return once(tmp_path_factory, "checkpoints", lambda ranks: on_ranks(2, ranks, of_two, 2, folder))


@pytest.fixture(scope="module")
def three(tmp_path_factory, folder, two):
    return once(tmp_path_factory, "checkpoints of three", lambda ranks: on_ranks(3, ranks, of_three, 3, folder))


def test_from_two_ranks_to_three_to_one_process(two, three, folder):
    wanted, in_few_bits, *_ = two[0]
    assert in_few_bits and len(wanted) == 3 + 3 * 3
    model, opt = made(32)
    load(model, opt, folder + "/of three")
    for found in (two[1][0], *three, values(model, opt)):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_step_goes_on_from_what_is_loaded_in_place(two):
    """Into what `state_dict()` gives out, of which PyTorch counts no write: the whole parameters are gathered again."""
    for _, _, losses, _ in two:
        assert torch.equal(*losses)


def test_a_restart_changes_nothing_on_as_many_ranks(two):
    for *_, (_, first, second) in two:
        assert len(first) == 2 + 6 + 6 * 4 + 3 + 2
        assert len(first) == len(second) and all(map(torch.equal, first, second))


def test_parameters_in_low_precision_from_two_ranks_in_one_process(two, folder):
    """Which loads them part by part."""
    wanted, *_ = two[0][-1]
    model, *_ = in_low_precision(seed=2)
    state = model.state_dict()
    checkpoint.load({"model": state}, checkpoint_id=folder + "/low")
    model.load_state_dict(state)
    for name, p in model.named_parameters():
        error = (p.detach().dequantize() - wanted[name]).abs().max()
        assert error <= 0.02 * wanted[name].abs().max()
