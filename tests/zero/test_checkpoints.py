"""A run that is saved by two ranks in stage 2 with states in 8 bits, goes on on three in stage 3 with states in full
precision, and then in one process: nothing is lost or changed on the way."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks, once, place
from test_sharding import load
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_state_dict
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
    return values(model, opt), torch.uint8 in bits


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
    wanted, in_few_bits = two[0]
    assert in_few_bits and len(wanted) == 3 + 3 * 3
    model, opt = made(32)
    load(model, opt, folder + "/of three")
    for found in (two[1][0], *three, values(model, opt)):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
