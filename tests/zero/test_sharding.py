"""`memopt.shard_`: what it refuses, what eager still does, and checkpoints."""

from __future__ import annotations

import copy

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks, once, place
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import memopt_compile as memopt
from memopt_compile.errors import MemoptError, OptionError

DOUBLE = torch.float64
BEGUN = ((1,), (2,), (3,), (1, True), (2, False, 8))  # arguments of `begun`


def says(function):
    """The class and the text of the error that every rank has to raise."""
    with pytest.raises(MemoptError) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def refusals(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))

    def shard(model=None, opt=None, mesh=mesh, stage=3):
        model = model or nn.Linear(4, 4)
        memopt.shard_(model, opt or cases.sgd(model), mesh, stage=stage)

    def with_gradient(here=True):
        model = nn.Linear(4, 4)
        if here:
            model.weight.grad = torch.ones(4, 4)
        return model

    def with_parameter(value):
        model = nn.Linear(4, 4)
        model.other = nn.Parameter(value)
        return model

    placed, sharded = nn.Linear(4, 4), nn.Linear(4, 4)
    placed.weight = nn.Parameter(distribute_tensor(placed.weight.detach(), mesh, [Replicate()]))
    shard(sharded)
    return {
        "stage is 4": says(lambda: shard(stage=4)),
        "mesh is a NoneType": says(lambda: shard(mesh=None)),
        "model is a SGD and opt a Linear": says(lambda: shard(cases.sgd(placed), placed)),
        "the mesh has two dimensions without names": says(
            lambda: shard(mesh=init_device_mesh("cpu", (1, ranks)))),
        "there is one process to share the model": says(lambda: shard(
            mesh=init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("nodes", "node")))),
        "the update of Adafactor is not known to be elementwise": says(
            lambda: shard(m := nn.Linear(4, 4), torch.optim.Adafactor(m.parameters()))),
        "weight is a DTensor with placements (Replicate(),)": says(lambda: shard(placed)),
        "weight is sharded already": says(lambda: shard(sharded)),
        "weight is shared by ranks, and cannot get another type": says(sharded.cpu().double),
        "other of shape (0, 4) has no rows": says(lambda: shard(with_parameter(torch.ones(0, 4)))),
        "other is complex and has no dimension": says(lambda: shard(with_parameter(torch.tensor(1j)))),
        "(Embedding) has sparse gradients": says(lambda: shard(nn.Embedding(4, 4, sparse=True))),
        "weight has a gradient": says(lambda: shard(with_gradient())),
        "keeps its parameters in a list of its own": says(lambda: shard(nn.LSTM(4, 4))),
        "the optimizer has 2 parameters that are not the model's": says(
            lambda: shard(opt=cases.sgd(nn.Linear(4, 4)))),
        "is on the meta device and has no reset_parameters()": says(
            lambda: shard(Bare())),
        "leaves mask, steps of the meta device without values": says(
            lambda: shard(Masked())),
        "leaves weight of the meta device without values": says(
            lambda: shard(Masked(sets=("mask", "steps")))),
        "(Embedding) has max_norm, by which it writes into its weight": says(
            lambda: shard(nn.Embedding(4, 4, max_norm=1.0))),
        ("weight has a gradient\n" if rank else "rank 1 is refused: weight has a gradient\n"): says(
            lambda: shard(with_gradient(rank == 1))),
        "parameters or settings of rank 1 are not those of rank 0": says(
            lambda: shard(nn.Linear(4, 4 + rank))),
    }


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.empty(4, device="meta"))


class Masked(nn.Module):
    """On the meta device: a parameter, a mask and integers, of which a reset sets some."""

    def __init__(self, sets=("weight",)):
        super().__init__()
        self.sets = sets
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
        self.register_buffer("mask", torch.empty(4, 4, dtype=torch.bool, device="meta"))
        self.register_buffer("steps", torch.empty(3, dtype=torch.int64, device="meta"))

    @torch.no_grad()
    def reset_parameters(self):
        if "weight" in self.sets:
            self.weight.normal_()
        else:
            self.weight[1:].zero_()  # but for a row
        if "mask" in self.sets:
            self.mask.bernoulli_()  # some are True by right
        if "steps" in self.sets:
            self.steps.fill_(torch.iinfo(torch.int64).max)


def compiled(rank, ranks, stage, asked=None, micro=1, shard=True, optimizer=cases.sgd, **options):
    model = cases.made(cases.even, DOUBLE)
    opt = optimizer(model)
    if shard:
        memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=stage)
    step = cases.step_of(model, opt, micro)
    return model, opt, step, torch.compile(step, backend="memopt", options={
        "zero": stage if asked is None else asked, "lowering": "eager", **options})


def wrong_steps(rank, ranks):
    batch = next(cases.batches(rank, ranks, DOUBLE))
    compiled(rank, ranks, 3, memory_budget="2GiB")[-1](*batch)  # with other options ranks look again
    return {
        "memopt.shard_(model, opt, mesh, stage=3)": says(
            lambda: compiled(rank, ranks, 3, shard=False)[-1](*batch)),
        'options={"zero": 3}': says(lambda: compiled(rank, ranks, 3, asked=0)[-1](*batch)),
        "the collectives of the step of rank 1": says(
            lambda: compiled(rank, ranks, 3, micro=1 + rank)[-1](*batch)),
        "the budget is 1 B" if rank else "rank 1 refuses its step: the smallest peak found": says(lambda: compiled(
            rank, ranks, 3, memory_budget=1 if rank else "1GiB")[-1](*batch)),
        "SGD has 2 parameters (1.weight, 1.bias ..) that memopt.shard_, which was given another": second_optimizer(
            rank, ranks, False, lambda step: memopt.compile(step, zero=2, lowering="eager")),
        "0.weight is shared by ranks, and what a module gives out is gathered": says(lambda: writing_into_a_read(
            rank, ranks, lambda step: step)),
        "`model[0].weight.clamp_(-1, 1)  # of what": says(lambda: writing_into_a_read(
            rank, ranks, lambda step: memopt.compile(step, zero=3, lowering="eager"))),
        "AdamW has 2 parameters (0.weight, 0.bias ..) that were frozen when": thawed(rank, ranks, batch),
        "  where: optimizer.step()": second_optimizer(rank, ranks, False, lambda step: step),
        "of shape (8, 16) ..) that memopt.shard_ has not shared": with_a_new_head(rank, ranks, batch, lambda step: step),
        "._modules['4']._parameters['weight'] is not sharded": with_a_new_head(
            rank, ranks, batch, lambda step: memopt.compile(step, zero=3, lowering="eager")),
        "is a DTensor that memopt.shard_ did not make: a copy of one": copied(rank, ranks, batch),
        "or what load_state_dict(.., assign=True) put in": copied(rank, ranks, batch, assign=True),
        "was sharded for stage 1 and weight for": second_optimizer(rank, ranks, 1, lambda s: memopt.compile(s, zero=2, lowering="eager")),
    }


def copied(rank, ranks, batch, assign=False):
    """A copy of a sharded model is trained by a compiled step, or the model behind a load that puts others in its place."""
    model, *_ = compiled(rank, ranks, 3)
    if assign:
        model.load_state_dict(model.state_dict(), assign=True)
    else:
        model = copy.deepcopy(model)
    return says(lambda: memopt.compile(cases.step_of(model, cases.sgd(model)), zero=3, lowering="eager")(*batch))


def writing_into_a_read(rank, ranks, run):
    model, *_ = compiled(rank, ranks, 3)

    def step(x):
        with torch.no_grad():
            model[0].weight.clamp_(-1, 1)  # of what was gathered
            return model(x)

    run(step)(torch.ones(2, 6, dtype=DOUBLE))


def thawed(rank, ranks, batch):
    """A layer that was frozen when ranks shared the others is trained, in eager."""
    model = cases.made(cases.even, DOUBLE)
    frozen = model[0].requires_grad_(False)
    opt = cases.adamw(model)
    opt.add_param_group({"params": list(frozen.parameters())})
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=1)
    step = cases.step_of(model, opt)
    step(*batch)
    frozen.requires_grad_(True)
    return says(lambda: step(*batch))


def second_optimizer(rank, ranks, shared, run=None):
    """Two optimizers of two layers: the first alone is given to `shard_`, or each its own layer, the second in stage `shared`."""
    model = cases.made(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), DOUBLE)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    mesh = init_device_mesh("cpu", (ranks,))
    memopt.shard_(model[0] if shared else model, first, mesh, stage=2)
    if shared:
        memopt.shard_(model[1], second, mesh, stage=shared)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for opt in (first, second):
            opt.step()
            opt.zero_grad()
        return loss

    x = torch.ones(2, 6, dtype=DOUBLE)
    if run is not None:
        return says(lambda: run(step)(x))
    before = cases.whole(model)
    memopt.compile(step, zero=2, lowering="eager")(x)
    return all((before[name] != value).any() for name, value in cases.whole(model).items())


def with_a_new_head(rank, ranks, batch, run):
    """A layer that comes after the others were shared, in eager and in a step that is compiled in pieces."""
    model, opt, *_ = compiled(rank, ranks, 3)
    model[4] = nn.Linear(16, 8, dtype=DOUBLE)
    opt.add_param_group({"params": list(model[4].parameters())})

    def step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        torch._dynamo.graph_break()
        loss.backward()
        opt.step()

    return says(lambda: run(step)(*batch))


def in_turn(rank, ranks):
    """The same weights whether eager or the compiled step updates them, and what is read between. PyTorch counts no
    writes of kernels for lists."""
    model, opt, step, run = compiled(rank, ranks, 2, optimizer=cases.adamw)
    opt.param_groups[0]["foreach"] = True
    for turn, batch in enumerate(cases.batches(rank, ranks, DOUBLE, steps=5)):
        (run if turn % 2 else step)(*batch)  # behind an eager step the whole parameters are old
    copied = copy.deepcopy(model)  # as for a mean of its weights
    with torch.no_grad():
        for mean, p in zip(copied.parameters(), model.parameters()):
            mean.lerp_(p, 0.5)
        seen, again = (each(torch.ones(2, 6, dtype=DOUBLE)) for each in (model, copied))
        next(copied.parameters()).zero_()
    assert torch.equal(seen, again)
    return {"parameters": cases.whole(model), "seen": seen, "names": list(model.state_dict()),
            "sharded": all(isinstance(p, DTensor) for p in model.state_dict().values())}


def checkpoints(rank, ranks, folder):
    """Saved in stage 2, loaded in stage 3."""
    model, opt, _, run = compiled(rank, ranks, 2, optimizer=cases.adamw)
    for batch in cases.batches(rank, ranks, DOUBLE, steps=2):
        run(*batch)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, opt))), checkpoint_id=folder)
    before = cases.whole(model), state_of(model, opt)
    model, opt, _, run = compiled(rank, ranks, 3, optimizer=cases.adamw)
    load(model, opt, folder)
    after = cases.whole(model), state_of(model, opt)
    run(*next(cases.batches(rank, ranks, DOUBLE)))
    return {"before": before, "after": after, "trained on": cases.whole(model)}


def load(model, opt, folder):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])


def state_of(model, opt):
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}.{key}": v.full_tensor() if isinstance(v, DTensor) else v.clone()
            for p, state in opt.state.items() for key, v in state.items()}


def from_meta(rank, ranks):
    """The values of the first rank, on all ranks, and where random numbers then are."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), Masked(("weight", "mask", "steps")))
    torch.manual_seed(rank)
    opt = cases.sgd(model)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)))
    same = {id(p) for p in model.parameters()} == {id(p) for p in opt.param_groups[0]["params"]}
    return cases.whole(model), dict(model.named_buffers()), same, torch.rand(())


def begun(rank, ranks, stage, meta=False, bits=None, replicas=1):
    """A frozen layer that two modules have, and buffers of several types, one of them expanded: each rank
    makes its own."""
    torch.manual_seed(rank)
    with torch.device("meta" if meta else "cpu"):
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3), nn.BatchNorm1d(3)])
    model[1].weight = model[0].weight.requires_grad_(False)
    if bits:
        memopt.quantize_parameters_(model, bits)
    for name, value in {"number": torch.tensor(rank), "mask": torch.rand(3) < 0.5, "waves": torch.rand(2) * 1j,
                        "expanded": torch.rand(1).expand(3)}.items():
        model.register_buffer(name, value)
    frozen = model[0].weight
    assert not frozen.requires_grad
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("nodes", "node"))
    memopt.shard_(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh if replicas > 1 else mesh["node"],
                  stage=stage)
    first, second = (module._parameters["weight"] for module in model[:2])
    assert first is second and (first is frozen) == (stage < 3 and not meta), (first, second, frozen)
    return {**{name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().dequantize()
               for name, p in model.named_parameters()}, **dict(model.named_buffers())}


def everything(rank, ranks, folder):
    return {"refusals": refusals(rank, ranks), "steps": wrong_steps(rank, ranks),
            "in turn": in_turn(rank, ranks), "checkpoints": checkpoints(rank, ranks, folder),
            "meta": from_meta(rank, ranks),
            "each its own": second_optimizer(rank, ranks, 2),
            "begun": [begun(rank, ranks, *how) for how in BEGUN]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(place(tmp_path_factory) / "sharding")


@pytest.fixture(scope="module")
def pair(tmp_path_factory, folder):
    return once(tmp_path_factory, "sharding", lambda ranks: on_ranks(2, ranks, everything, 2, folder))


@pytest.mark.parametrize("kind", ["refusals", "steps"])
def test_refuses_on_every_rank(pair, kind):
    for rank in pair:
        for words, (_, text) in rank[kind].items():
            assert words in text


def test_what_differs_between_ranks_is_an_error_of_its_own(pair):
    assert pair[0]["refusals"]["rank 1 is refused: weight has a gradient\n"][0] == "RankError"
    assert [rank["steps"]["the collectives of the step of rank 1"][0] for rank in pair] == 2 * ["RankError"]


def test_eager_and_compiled_steps_in_turn(pair):
    model = cases.made(cases.even, DOUBLE)
    step = cases.step_of(model, cases.adamw(model))
    for (x, y), (u, v) in zip(*(cases.batches(rank, 2, DOUBLE, steps=5) for rank in (0, 1))):
        step(torch.cat([x, u]), torch.cat([y, v]))
    for rank in pair:
        found = rank["in turn"]
        assert found["names"] == list(model.state_dict()) and found["sharded"]
        for name, value in cases.whole(model).items():
            assert float((found["parameters"][name] - value).abs().max()) <= 1e-11
        assert torch.allclose(found["seen"], model(torch.ones(2, 6, dtype=DOUBLE)), atol=1e-11, rtol=0)


def test_checkpoint_of_one_stage_in_another_and_in_one_process(pair, folder):
    model = cases.made(cases.even, DOUBLE)
    opt = cases.adamw(model)
    load(model, opt, folder)
    here = cases.whole(model), state_of(model, opt)
    for rank in pair:
        before, after = rank["checkpoints"]["before"], rank["checkpoints"]["after"]
        for kind in (0, 1):
            assert before[kind].keys() == after[kind].keys() == here[kind].keys()
            assert all(torch.equal(before[kind][n], after[kind][n]) for n in before[kind])
            assert all(torch.equal(before[kind][n], here[kind][n]) for n in before[kind])
        first, second = (r["checkpoints"]["trained on"] for r in pair)
        assert all(torch.equal(first[n], second[n]) for n in first)


def test_meta_device(pair):
    (first, there, same, drawn), (second, here, _, _) = (rank["meta"] for rank in pair)
    assert same and all(torch.equal(first[n], second[n]) and first[n].isfinite().all() for n in first)
    assert len(there) == 5 and all(torch.equal(there[n], here[n]) for n in there)
    torch.manual_seed(0)
    nn.Linear(3, 5)
    weight, mask = torch.randn(4, 4), torch.empty(4, 4, dtype=torch.bool).bernoulli_()
    assert torch.equal(first["2.weight"], weight) and torch.equal(there["2.mask"], mask)
    assert torch.equal(drawn, torch.rand(()))


@pytest.mark.parametrize("which", range(len(BEGUN)))
def test_all_ranks_go_on_from_the_first_with_what_is_frozen_and_buffers(pair, which):
    first, second = (rank["begun"][which] for rank in pair)
    assert len(first) == 5 + 3 + 4 and first["number"] == 0
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_optimizer_may_be_given_its_own_modules(pair):
    assert all(rank["each its own"] for rank in pair)


def test_refuses_without_a_process_group():
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match="there is no process group"):
        memopt.shard_(model, cases.sgd(model), None)


def test_refuses_one_process(tmp_path):
    model = nn.Linear(4, 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/found", rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match="there is one process"):
            memopt.shard_(model, cases.sgd(model), init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
