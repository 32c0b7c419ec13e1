"""AdamA on several ranks is AdamA in one process with all of their micro-batches.

Real gloo processes. They take seconds to start, so each group runs every case, and the tests look
at what came of it.
"""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks, once
from test_adama import algorithm_2, mini_batches
from torch import nn
from training import SHAPES, difference, parameters

import memopt_compile as memopt
from memopt_compile import driver
from memopt_compile.errors import OptimizerError
from memopt_compile.optim import AdamA, data_parallel, slabs

N = 3  # micro-batches a rank
SETTINGS = {
    "plain": {},
    "all settings": {"weight_decay": 0.1, "amsgrad": True, "v_scale": 2.5, "maximize": True,
                     "betas": (0.8, 0.9)},
    "clipped": {"max_norm": 0.2, "skip_nonfinite": True},
}


def adama(ps, rank, ranks, **settings):
    return AdamA(ps, lr=0.02, process_group=dist.group.WORLD if ranks > 1 else None, **settings)


def gradients(ps, ranks):
    """Per step, per micro-batch of all ranks: ∇f/(N·M). One parameter is left out by odd
    micro-batches in the second step, another by all, and by rank 0 a third."""
    steps = mini_batches(ps, N * ranks)
    for batch in steps:
        for i, micro in enumerate(batch):
            micro[1] = None
            if batch is steps[1] and i % 2:
                micro[2] = None
            if i < N:
                micro[0] = None
    return steps


def fed(rank, ranks, small=False, **settings):
    """Parameters and states after some steps; `small`: in many slabs and buckets."""
    ps = parameters()
    limits = (1, 64) if small else (slabs.ELEMENTS, data_parallel.BUCKET)
    with mock.patch.object(slabs, "ELEMENTS", limits[0]), \
            mock.patch.object(data_parallel, "BUCKET", limits[1]):
        opt = adama(ps, rank, ranks, **settings)
        for batch in gradients(ps, ranks):
            for micro in batch[rank * N:(rank + 1) * N]:
                for p, g in zip(ps, micro):
                    p.grad = None if g is None else g * ranks
                opt.accumulate()
            opt.step()
    return [p.detach() for p in ps], [{k: v for k, v in opt.state[p].items()} for p in ps]


def low_bit(rank, ranks, bits):
    ps = parameters([(128, 64), (3,)])
    with mock.patch.object(slabs, "ELEMENTS", 4096):
        opt = adama(ps, rank, ranks, state_bits=bits)
        for batch in mini_batches(ps, N * ranks):
            for micro in batch[rank * N:(rank + 1) * N]:
                for p, g in zip(ps, micro):
                    p.grad = g * ranks
                opt.accumulate()
            opt.step()
    return [p.detach() for p in ps]


def bfloat16(rank, ranks):
    ps = parameters(dtype=torch.bfloat16)
    opt = adama(ps, rank, ranks)
    for i in range(3):
        for p in ps:
            p.grad = torch.full_like(p, 0.1 * (i + rank + 1))
        opt.step()
    return [p.detach() for p in ps]


def memory(rank, ranks):
    """Transient bytes of a step, with states of 64 MiB.

    All ranks have the same values, so the sum over them is a product here: gloo's own threads let
    go of what they have sent when they get round to it.
    """
    p = nn.Parameter(torch.zeros(1 << 23))
    opt = adama([p], rank, ranks)

    def step():
        with mock.patch.object(dist, "all_reduce", lambda values, group: values.mul_(ranks)):
            opt.step()

    for _ in range(2):  # the first one makes the states
        p.grad = torch.ones_like(p)
        opt.accumulate()
        found = memopt.measure(step).transient_peak_bytes
    return found


class Branches(nn.Module):
    """The second branch is for inputs of rank 1."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x, both):
        hidden = self.first(x) + (self.second(x) if both else 0)
        return self.last(F.gelu(hidden))


def trained(rank, ranks, lowering=None, uses=lambda rank: True, in_backward=False):
    """Weights after some steps on a model, and how each step was captured."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Branches().double()
    opt = adama(model.parameters(), rank, ranks, max_norm=0.05)
    handle = opt.accumulate_in_backward() if in_backward else None

    def step(x, y, both):
        total = 0.0
        for xs, ys in memopt.micro_batches(N, x, y):
            loss = F.cross_entropy(model(xs, both), ys) / N
            loss.backward()
            if handle is None:
                opt.accumulate()
            total = total + loss.detach()
        opt.step()
        return total

    def alone(x, y):
        for i, (xs, ys) in enumerate(zip(x.chunk(N * 2), y.chunk(N * 2))):
            (F.cross_entropy(model(xs, uses(i // N)), ys) / (2 * N)).backward()
            opt.accumulate()
        opt.step()

    made = []
    run = step if lowering is None else torch.compile(
        step, backend="memopt", options={"lowering": lowering})
    generator = torch.Generator().manual_seed(5)
    with mock.patch.object(driver, "remember", lambda frame, record: made.append(record)):
        for _ in range(4):
            x = torch.randn(12 * N, 8, generator=generator, dtype=torch.float64)
            y = torch.randint(3, (12 * N,), generator=generator)
            if ranks == 1:
                alone(x, y)
            else:
                run(x.chunk(ranks)[rank], y.chunk(ranks)[rank], uses(rank))
    reasons = [(record.kind, record.reason) for record in made]
    return [p.detach() for p in model.parameters()], reasons


def one_used(rank):
    return rank == 1


def refusals(rank, ranks):
    """What each misuse says. All ranks have to refuse, or none could go on."""
    def says(function):
        with pytest.raises(OptimizerError) as caught:
            function()
        return str(caught.value)

    world, ps = dist.group.WORLD, parameters()
    opt = AdamA(ps, process_group=world)
    found = {
        "values": says(lambda: AdamA(parameters(seed=rank), process_group=world)),
        "settings": says(lambda: AdamA(ps, lr=0.1 + rank, process_group=world)),
        "shapes": says(lambda: AdamA(parameters([(2 + rank,)]), process_group=world)),
        "new group": says(lambda: opt.add_param_group({"params": parameters([(2 + rank,)])})),
        "copy": says(lambda: copy.deepcopy(opt)),
        "pickle": says(lambda: pickle.dumps(opt)),
    }
    ps[0].grad = torch.ones_like(ps[0])
    opt.accumulate()
    found["state"] = says(opt.state_dict)
    return found


def everything(rank, ranks):
    calls = []
    reduce = dist.all_reduce
    found = {name: fed(rank, ranks, **settings) for name, settings in SETTINGS.items()}
    with mock.patch.object(dist, "all_reduce", lambda *a, **k: calls.append(a) or reduce(*a, **k)):
        found["in one bucket"], one = fed(rank, ranks), len(calls)
        found["small"], many = fed(rank, ranks, small=True), len(calls) - one
    found["calls"], found["largest"] = (one, many), max(a[0].nbytes for a in calls[one:])
    found |= {f"{bits} bits": low_bit(rank, ranks, bits) for bits in (16, 8)}
    found["bfloat16"] = bfloat16(rank, ranks)
    if ranks == 2:
        found["memory"] = memory(rank, ranks)
        found["inductor"] = trained(rank, ranks, lowering="inductor")
        found["eager"] = trained(rank, ranks)[0]
        found["in backward"] = trained(rank, ranks, in_backward=True)[0]
        found["captured"] = trained(rank, ranks, lowering="eager")
        found["one captured"] = trained(rank, ranks, lowering="eager", uses=one_used)
        found["refusals"] = refusals(rank, ranks)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "AdamA of two", lambda folder: on_ranks(2, folder, everything, 2))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return once(tmp_path_factory, "AdamA of four", lambda folder: on_ranks(4, folder, everything, 4))


@pytest.fixture(params=["pair", "four"])
def results(request):
    return request.getfixturevalue(request.param)


def zeros(batches, ps):
    return [[[torch.zeros_like(p) if g is None else g for p, g in zip(ps, micro)]
             for micro in batch] for batch in batches]


@pytest.mark.parametrize("name", [*SETTINGS, "small"])
@pytest.mark.table(4)
def test_is_algorithm_2_of_all_micro_batches(results, name):
    ps, ranks, settings = parameters(), len(results), SETTINGS.get(name, {})
    batches = zeros(gradients(ps, ranks), ps)
    if "max_norm" in settings:
        batches = [[[g * (settings["max_norm"] / g.norm()).clamp(max=1) for g in micro]
                    for micro in batch] for batch in batches]
    expected, m, v = algorithm_2(
        ps, batches, betas=settings.get("betas", (0.9, 0.999)),
        decay=settings.get("weight_decay", 0), scale=settings.get("v_scale", 1),
        amsgrad=settings.get("amsgrad", False), sign=-1 if settings.get("maximize") else 1)
    expected[1] = ps[1]  # used by nobody: left alone
    for found, states in (result[name] for result in results):
        assert difference(found, expected) <= 1e-12
        used = [i for i in range(len(SHAPES)) if i != 1]
        assert states[1] == {}
        assert difference([states[i]["exp_avg"] for i in used], [m[i] for i in used]) <= 1e-12
        assert difference([states[i]["exp_avg_sq"] for i in used], [v[i] for i in used]) <= 1e-12


@pytest.mark.parametrize("name", [*SETTINGS, "small"])
def test_is_one_process_with_all_micro_batches(results, name):
    alone, _ = fed_alone(len(results), **SETTINGS.get(name, {}))
    assert all(difference(result[name][0], alone) <= 1e-12 for result in results)


def fed_alone(ranks, **settings):
    ps = parameters()
    opt = adama(ps, 0, 1, **settings)
    for batch in gradients(ps, ranks):
        for micro in batch:
            for p, g in zip(ps, micro):
                p.grad = None if g is None else g.clone()
            opt.accumulate()
        opt.step()
    return [p.detach() for p in ps], opt


def test_weights_are_the_same_bits_on_all_ranks(results):
    names = [*SETTINGS, "small", "16 bits", "8 bits", "bfloat16", "eager", "in backward", "captured",
             "inductor"]
    for name in set(names) & results[0].keys():
        for result in results:
            first, here = (r[name] for r in (results[0], result))
            if isinstance(here, tuple):
                first, here = first[0], here[0]
            assert all(torch.equal(a, b) for a, b in zip(first, here)), name


def test_small_parameters_share_a_call(results):
    """Four steps: one call each, or many of no more bytes than the largest slab, 27 elements."""
    one, many = results[0]["calls"]
    assert one == 4 < many and results[0]["largest"] == (1 + 2 * 27) * 8


def test_no_more_than_a_bucket_is_held_beside_the_states(pair):
    assert all(result["memory"] <= 1.1 * data_parallel.BUCKET for result in pair), [
        result["memory"] for result in pair]


@pytest.mark.parametrize("bits", [16, 8])
def test_low_bit_states(results, bits):
    ps = parameters([(128, 64), (3,)])
    expected, _, _ = algorithm_2(ps, mini_batches(ps, N * len(results)))
    begin = ps[0].detach()
    moved, found = expected[0] - begin, results[0][f"{bits} bits"][0] - begin
    assert float((found - moved).norm() / moved.norm()) <= 0.05
    assert difference([results[0][f"{bits} bits"][1]], [expected[1]]) <= 1e-12


def test_models_in_eager_and_captured_whole(pair):
    expected, _ = trained(0, 1)
    for result in pair:
        for way in ("eager", "in backward"):
            assert difference(result[way], expected) <= 1e-12
        for way in ("captured", "inductor"):
            found, reasons = result[way]
            assert difference(found, expected) <= 1e-12
            assert reasons == [("step", None)]


def test_rank_that_does_not_use_a_parameter_goes_by_the_ordinary_path(pair):
    expected, _ = trained(0, 1, uses=one_used)
    assert all(difference(result["one captured"][0], expected) <= 1e-12 for result in pair)
    assert pair[1]["one captured"][1] == [("step", None)]
    reasons = [reason for _, reason in pair[0]["one captured"][1]]
    assert "has no gradient on this rank" in reasons[0]


@pytest.mark.parametrize(("case", "words"), [
    ("values", "does not begin with the values"), ("settings", "settings of rank 1"),
    ("shapes", "parameters or settings of rank 1"), ("new group", "settings of rank 1"),
    ("copy", "cannot be copied"), ("pickle", "cannot be copied"),
    ("state", "a part of this rank alone")])
def test_refuses_on_all_ranks(pair, case, words):
    assert all(words in result["refusals"][case] for result in pair)


def test_refuses_what_is_no_group():
    with pytest.raises(OptimizerError, match="process_group is 2"):
        AdamA(parameters(), process_group=2)
