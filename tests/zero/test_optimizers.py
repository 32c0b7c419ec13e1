"""The optimizers of `memopt.optim` with their states in shards."""

from __future__ import annotations

import copy
from functools import partial
from unittest import mock

import cases
import low_precision
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks, once, thinned
from test_sharding import says
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import memopt_compile as memopt
from memopt_compile import records, zero
from memopt_compile.errors import OptionError
from memopt_compile.optim import CAME, SGD, Adafactor, Adam, AdamA, AdamW, one_operator
from memopt_compile.options import Options

DOUBLE, STEPS = torch.float64, 3


class Few(nn.Module):
    """Rows that two ranks do not divide, one row, no dimension; a matrix, a vector and a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 3, 2) / 3)
        self.bias, self.scale = nn.Parameter(torch.randn(5)), nn.Parameter(torch.tensor(1.5))
        self.last = nn.Parameter(torch.randn(1, 5))

    def forward(self, x):
        hidden = F.gelu(x @ self.kernel.flatten(1).t() + self.bias) * self.scale
        return F.pad(hidden @ self.last.t(), [0, 2]) + hidden[:, :3]


class Wide(nn.Module):
    """Parameters of whole blocks of 8, 4 and 1 bits on each of two ranks, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 64), nn.Linear(64, 128, bias=False)
        self.third, self.fourth = nn.Linear(128, 64, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x):
        return self.fourth(self.third(F.gelu(self.second(F.gelu(self.first(x))))))


def few_bits(model, of_fourth=32):
    bits = {"second.weight": 8, "third.weight": 4, "fourth.weight": of_fourth}
    return Adam([{"params": [p], "state_bits": bits.get(name, 32)} for name, p in
                 model.named_parameters()], lr=0.02, amsgrad=True, weight_decay=0.1, skip_nonfinite=True)


def of(kind, *given, **settings):
    return partial(_make, kind, given, settings)


def _make(kind, given, settings, model):
    return kind(model.parameters(), *given, **settings)


# Each in eager, some captured too.
KINDS = {
    "sgd": (of(SGD, 0.1, momentum=0.9, dampening=0.1, maximize=True), {}),
    "clipped": (of(AdamW, 0.02, max_norm=0.05, skip_nonfinite=True), {}),
    "came, rows first": (of(CAME, 0.02, factor_dims="auto", weight_decay=0.1), {}),
    "came, rows last": (of(CAME, 0.02, factor_dims=(1, 0)), {}),
    "adafactor, first two": (of(Adafactor, factor_dims=(0, 1), weight_decay=0.1), {}),
    "came in parts": (of(CAME, 0.02, factor_dims=(0, 1), micro_batches=2), {"micro": 2, "fold": True}),
    "came": (of(CAME, 0.02), {}),
    "adafactor": (of(Adafactor, factor_dims=(-1, 0)), {}),
    "adama": (of(AdamA, 0.02, weight_decay=0.1, max_norm=0.05), {"micro": 2, "fold": True}),
    "option": (of(torch.optim.AdamW, 0.02), {"micro": 2, "accumulate": "optimizer_states"}),
}
FROM_ONE = [(3, torch.optim.AdamW), (2, torch.optim.AdamW), (3, AdamW), (1, SGD, 8)]
MASTER, MASTER_IN = of(AdamW, 0.02, weight_decay=0.1, weight_bits=32), thinned([1, 3])
CAPTURED = {"came": 1, "adama": 3, "option": 2}  # and in which stage
# In a step whose updates are operators between sums over ranks.
PARTS = dict(thinned([
    ("adafactor", (1, of(Adafactor, factor_dims="auto", skip_nonfinite=True, maximize=True))),
    ("came", (3, of(CAME, 0.02, state_bits=8, weight_decay=0.1, skip_nonfinite=True))),
]))
PARTS_OF = ((2048, 1024), (5, 3), (1, 5), (3,))  # elements


def in_eager(rank, ranks, optimizer, micro=1, fold=False):
    model = cases.made(Few, DOUBLE)
    opt = optimizer(model)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=3)
    step = cases.step_of(model, opt, micro, fold=fold)
    return [float(step(x, y)) for x, y in cases.batches(rank, ranks, DOUBLE, STEPS)], cases.whole(model)


def in_parts(rank, ranks, stage, optimizer):
    """How far parameters and states of a captured step, whose gradients are given, are from eager's after three of
    them, the second with a gradient of one rank that is not finite. Its operators; and what it holds beside all that
    stays, predicted and measured."""
    found = []
    for captured in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.ParameterList(torch.randn(*size, dtype=DOUBLE) for size in PARTS_OF)
        opt = optimizer(model)
        memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=stage)
        parameters = [*model.parameters()]

        def step(grads, model=model, opt=opt, parameters=parameters):
            model[-1].sum().backward()
            for p, grad in zip(parameters[:-1], grads):
                p.grad = grad
            opt.step()
            opt.zero_grad()

        run = torch.compile(step, backend="memopt", options={"zero": stage, "lowering": "eager"}) if captured else step
        for i in range(3):
            grads = [(p.detach() * (i + 1)).cos() for p in parameters[:-1]]
            if i == rank == 1:
                grads[0].to_local()[0, 0] = float("nan")
            run(grads)
        found.append([*cases.whole(model).values(), *(
            s for p in parameters for s in opt.state[p].values() if torch.is_tensor(s))])
    stays = (model, opt, grads)
    distance = max(float((a.double() - b.double()).abs().max()) for a, b in zip(*found) if a.numel())
    record = records.compilations(step.__code__)[-1]
    resident = memopt.measure(lambda: None, resident=stays).resident_bytes
    held = [record.predicted_peak_bytes, min(cases.peaks(run, [(grads,)] * 2, stays))]
    return record.kind, distance, record.step.op_counts(), [each - resident for each in held]


def moved(rank, ranks, dtype=torch.float32, optimizer=few_bits, state="exp_avg"):
    """Trained in one process, sharded with its states, saved in stage 2, loaded in stage 3."""
    batches = list(cases.batches(rank, ranks, dtype, 4))
    whole = [torch.cat(each) for each in zip(*(next(iter(cases.batches(r, ranks, dtype))) for r in (0, 1)))]
    model = cases.made(Wide, dtype)
    opt = optimizer(model)
    cases.step_of(model, opt)(*whole)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=2)
    step = cases.step_of(model, opt)
    step(*batches[1])
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, opt)))
    again = cases.made(Wide, dtype)
    other = optimizer(again)
    memopt.shard_(again, other, init_device_mesh("cpu", (ranks,)), stage=3)
    other.load_state_dict(opt.state_dict())
    same = all(torch.equal(a[name], b[name]) for a, b in zip(opt.state.values(), other.state.values())
               for name in a)
    return same, saved["optimizer"]["state"]["second.weight"][state].full_tensor(), len(other.state)


def from_one_process(rank, ranks, stage, kind, bits=None):
    """How far parameters are from those of one process whose checkpoint was loaded here, at once and after two steps
    of both with the same rows."""
    models, opts = [], []
    for _ in range(2):
        models.append(cases.made(lambda: nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)), DOUBLE))
        if bits:
            memopt.quantize_parameters_(models[-1], bits, rounding="nearest")
        opts.append(kind(models[-1].parameters(), lr=0.02))
    rows = list(cases.batches(0, ranks, DOUBLE))
    cases.step_of(models[0], opts[0])(*rows[0])
    saved = [copy.deepcopy(each.state_dict()) for each in (models[0], opts[0])]
    memopt.shard_(models[1], opts[1], init_device_mesh("cpu", (ranks,)), stage=stage)
    for each, state in zip((models[1], opts[1]), saved):
        each.load_state_dict(state)
    found = []
    for batch in (None, *rows[1:]):
        for model, opt in zip(models, opts):
            if batch:
                cases.step_of(model, opt)(*batch)
        one, shared = (cases.whole(model) for model in models)
        found.append(max(float((shared[name].double() - p.double()).abs().max()) for name, p in one.items()))
    return found


def refusals(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))

    def shard(kind, **settings):
        model = nn.Linear(4, 4)
        memopt.shard_(model, kind(model.parameters(), **settings), mesh)

    return {
        "state_bits=16 of AdamW rounds each element": says(lambda: shard(AdamW, state_bits=16)),
        "weight_bits=24 of SGD rounds each element": says(lambda: shard(SGD, weight_bits=24)),
        "AdamA sums up its states over a process group": says(
            lambda: shard(AdamA, process_group=mesh.get_group())),
    }


def everything(rank, ranks):
    found = {("few bits", stage): cases.trained(rank, ranks, stage, Wide, optimizer=partial(few_bits, of_fourth=1))
             for stage in (0, 3)}
    for name, (optimizer, how) in KINDS.items():
        if "accumulate" not in how:
            found[name] = in_eager(rank, ranks, optimizer, **how)
        if name in CAPTURED:
            found[name, "captured"] = cases.trained(rank, ranks, CAPTURED[name], Few, DOUBLE, optimizer, **how)
    found |= {("master", stage): cases.trained(rank, ranks, stage, Few, torch.bfloat16, MASTER) for stage in (0, *MASTER_IN)}
    found |= {("from one process", *how): from_one_process(rank, ranks, *how) for how in FROM_ONE}
    with mock.patch.object(one_operator, "LARGE", 1):
        found |= {("in parts", name): in_parts(rank, ranks, *how) for name, how in PARTS.items()}
    return {**found, "refusals": refusals(rank, ranks), "moved": moved(rank, ranks),
            "moved master": moved(rank, ranks, torch.bfloat16, MASTER, "correction"),
            "low": low_precision.everything(rank, ranks)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "optimizers", lambda folder: on_ranks(2, folder, everything, 2))


@pytest.mark.parametrize("name", KINDS)
def test_is_one_process_on_the_whole_batch(pair, name):
    optimizer, how = KINDS[name]
    if name == "option":
        optimizer, how = of(AdamA, 0.02, weight_decay=0.01), {"micro": 2, "fold": True}
    expected = cases.alone(Few, 2, optimizer, **how)
    for rank in pair:
        for found in (rank[key] for key in (name, (name, "captured")) if key in rank):
            parameters = found["parameters"] if isinstance(found, dict) else found[1]
            for key, value in expected["parameters"].items():
                assert float((parameters[key] - value).abs().max()) <= 1e-11


@pytest.mark.parametrize(("name", "stage"), [("few bits", 3), *(("master", stage) for stage in MASTER_IN)])
def test_elementwise_ones_are_data_parallel_bit_for_bit(pair, name, stage):
    """In few bits too, where the blocks of a rank are blocks of the whole; in bfloat16 with a master copy."""
    for rank in pair:
        found, plain = rank[name, stage], rank[name, 0]
        assert found["losses"] == plain["losses"]
        assert all(torch.equal(value, plain["parameters"][n]) for n, value in found["parameters"].items())


def test_steps_are_captured_whole(pair):
    for rank in pair:
        assert {(r["kind"], r["reason"]) for r in rank.values() if "kind" in r} == {("step", None)}


def test_updates_communicate_where_their_gradient_is_scattered(pair):
    """Not behind the whole backward. Five sums for the matrix `last`, one for a vector, and for a batch of
    matrices, whose means are of one row each; and the gradient of the scale."""
    calls = pair[0]["came", "captured"]["calls"]
    assert calls.count("all_reduce") == 5 + 1 + 1 + 1
    scatters = [i for i, name in enumerate(calls) if name.startswith("reduce_scatter")]
    assert any(scatters[0] < i < scatters[-1] for i, name in enumerate(calls) if name == "all_reduce")


@pytest.mark.parametrize("name", PARTS)
def test_parts_between_sums_over_ranks_are_as_in_eager(pair, name):
    for rank in pair:
        kind, distance, counts, _ = rank["in parts", name]
        assert kind == "step" and distance <= 1e-12
        assert name != "came" or counts["quantized_update_"] == 4 * len(PARTS_OF) and "quantized_update" not in counts


def test_updates_hold_slabs(pair):
    """Not an array of 1,048,576 elements, the rows that a rank has of the largest parameter."""
    for rank in pair:
        predicted, measured = rank["in parts", "came"][-1]
        assert predicted <= 5 * 2**20 and abs(predicted - measured) <= 4096


def test_states_are_of_the_rows(pair):
    """Few: 30 + 5 + 1 + 5 elements, of which rank 0 has 3 · 6, 3, 1 and 5, and rank 1 2 · 6, 2, 1 and none.
    Parameters have the storage of the largest part."""
    for rank, rows in zip(pair, (27, 15)):
        assert rank["adama", "captured"]["resident"] == 8 * (2 * rows + 27) + 4 * 4  # and the steps


@pytest.mark.parametrize("name", ["moved", "moved master"])
def test_states_go_with_the_model_and_to_other_stages(pair, name):
    for same, whole, states in (rank[name] for rank in pair):
        assert same and whole.shape[:2] == (128, 64) and whole.any() and states == 5
    assert torch.equal(pair[0][name][1], pair[1][name][1])


def test_master_copies_are_shared(pair):
    """Of 41 elements as in Few: 2 bytes of each whole in stage 1, or the storage of the largest part (27) in
    stage 3; and of this rank's rows 2 of the master copy and 8 of the moments; the steps of four parameters."""
    for rank, rows in zip(pair, (27, 15)):
        for stage in MASTER_IN:
            assert rank["master", stage]["resident"] == 2 * (27 if stage == 3 else 41) + 10 * rows + 4 * 4


@pytest.mark.parametrize("how", FROM_ONE)
def test_checkpoints_of_one_process_load(pair, how):
    for rank in pair:
        assert all(distance <= (0.02 if 8 in how else 1e-12) for distance in rank["from one process", *how])


def test_refuses_by_name(pair):
    for rank in pair:
        for words, (_, text) in rank["refusals"].items():
            assert words in text


def test_refuses_to_clip_by_a_part():
    opt = AdamW([nn.Parameter(torch.ones(3))], max_norm=1.0)
    options = Options(zero=3, accumulate="optimizer_states")
    with pytest.raises(OptionError, match="would clip by the norm of this rank's rows"):
        zero.check(options, (), [opt], "here")
