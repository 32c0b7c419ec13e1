"""Activations that few bits cannot hold: the step is taken back and runs exactly."""

import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import by_hand, captured, gradient, seed, two_layers, values_for  # noqa: E402

from memopt_compile.backends import eager, inductor  # noqa: E402
from memopt_compile.finiteness import NotFinite  # noqa: E402
from memopt_compile.lowering.inlining import inlined  # noqa: E402
from memopt_compile.lowering.pieces import can_cut  # noqa: E402
from memopt_compile.memory_plan import MemoryPlan  # noqa: E402
from memopt_compile.passes import check_finite  # noqa: E402
from memopt_compile.passes.canonicalize import Canonicalize  # noqa: E402
from memopt_compile.passes.check_finite import CheckFinite  # noqa: E402
from memopt_compile.passes.compress import Compress  # noqa: E402
from memopt_compile.passes.update_in_place import UpdateInPlace  # noqa: E402
from memopt_compile.step_graph import Role  # noqa: E402


class Block(nn.Module):
    """softplus(-inf) is 0 and has no gradient: what reaches it may be infinite."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)

    def forward(self, x, bias):
        return x + self.dropout(self.norm(F.softplus(self.linear(x) + bias)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(64, 4)

    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


X, Y = torch.randn(1024, 64, generator=torch.manual_seed(1)).double(), torch.arange(1024) % 4
FINITE, INFINITE = torch.zeros(1024, 64).double(), torch.zeros(1024, 64).double()
for column in range(5, 13):  # more than are kept as outliers
    INFINITE[column::9, column] = -torch.inf


def trained(biases, **options):
    """(report, losses, state of the model) after a step with each of these biases."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().double()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, bias, y):
        loss = F.cross_entropy(model(x, bias), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, memory_budget=0.75, **options)
    torch.manual_seed(7)
    losses = [float(compiled(X, bias, Y)) for bias in biases]
    return memopt.report(compiled), losses, {k: v.clone() for k, v in model.state_dict().items()}


def test_taken_back_and_run_exactly(caplog):
    """Statistics of the normalization and random numbers included."""
    _, expected, exact = trained([INFINITE], lowering="eager")
    report, losses, state = trained([INFINITE], lowering="eager", compress="int4")
    assert report.plan.largest_error > 0 and report.taken_back == 1
    assert losses == expected and all(torch.equal(exact[k], v) for k, v in state.items())
    warning, = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "test_finiteness.py" in warning and "not finite" in warning and "the budget" in warning
    assert "taken back" in str(report)


def test_looking_keeps_nothing_beside_the_step():
    """The generator's state was a tensor of 5 kB, and the step as much above its budget."""
    torch._dynamo.reset()
    layers = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.Softplus())), nn.Linear(32, 4))
    opt = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x, y):
        loss = F.cross_entropy(layers(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, lowering="eager", memory_budget=0.8, compress="int4", recompute=False)
    args = torch.randn(512, 32), torch.arange(512) % 4
    compiled(*args)
    report = memopt.report(compiled)
    assert report.plan.largest_error and report.predicted_peak_bytes == report.measured_peak_bytes
    again = memopt.measure(compiled, *args, resident=(layers, opt))
    assert 0 <= again.peak_bytes - report.measured_peak_bytes < 256


def test_only_those_steps_are():
    _, _, exact = trained([FINITE, INFINITE, FINITE], lowering="eager")
    report, losses, state = trained([FINITE, INFINITE, FINITE], lowering="eager", compress="int4")
    assert report.taken_back == 1
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= report.budget_bytes
    assert all(torch.isfinite(v).all() for v in state.values())
    assert not torch.equal(state["head.weight"], exact["head.weight"])


def test_so_are_those_under_a_later_plan():
    """The first plan has no lossy format; that of the watched step has."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 512) for _ in range(4))
    head = nn.Linear(512, 4)
    opt = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=1e-3)
    x, y = torch.randn(512, 64), torch.arange(512) % 4

    def step(bias):
        loss = F.cross_entropy(head(sum(F.softplus(layer(x) + bias) for layer in layers)), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, lowering="eager", memory_budget=0.7, compress="int4", adapt=True,
                              max_gradient_error=0.05)
    heavy, infinite = torch.zeros(512, 512), torch.zeros(512, 512)
    heavy[:, ::16] = 30.0
    infinite[:, 5:13] = -torch.inf
    compiled(heavy)
    report = memopt.report(compiled)
    assert report.history and report.plan.largest_error and not report.history[0].after > 1
    assert torch.isfinite(compiled(infinite)) and memopt.report(compiled).taken_back == 1


def packed(step, form="int8"):
    step.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(), (("tanh", form),))
    Compress().run(step)
    return step


def test_golden():
    """What it adds stands behind the scales that it reads."""
    step = packed(two_layers())
    given = step.text().splitlines()
    CheckFinite().run(step)
    step.verify()
    lines = step.text().splitlines()
    behind = lines.index("  getitem_1: f32[1, 1, 1] = getitem(compress_0, 1)") + 1
    assert lines[behind:behind + 2] == [
        "  sum_0: f32[] = sum.dim_IntList(getitem_1, None, dtype=torch.float32)",
        "  require_finite_0: NoneType = require_finite(sum_0, [], [])"]
    assert lines[:behind] == given[:behind] and len(lines) == len(given) + 2


def test_nothing_to_do():
    assert "lossy" in CheckFinite().requires(two_layers())
    assert "lossy" in CheckFinite().requires(packed(two_layers(), "1-bit sign"))


def counting():
    """A step that counts its calls in a buffer before anything is packed."""
    def layer(p, buffer, x):
        buffer.add_(1)
        tanh = torch.tanh(torch.mm(x, p))
        loss = tanh.sum()
        upstream = torch.ops.aten.expand(seed(loss), (8, 4))
        return loss, gradient(torch.mm(x.permute(1, 0), upstream * torch.cos(tanh)))

    return packed(by_hand(layer, ("p", torch.rand(4, 4).double()), ("b", torch.zeros(4)),
                          ("x", torch.rand(8, 4).double())))


@pytest.mark.parametrize("lower", [
    eager.lower, pytest.param(inductor.lower, marks=pytest.mark.inductor)], ids=["eager", "inductor"])
def test_what_was_written_is_put_back(lower):
    step = counting()
    assert CheckFinite().requires(step) is None
    CheckFinite().run(step)
    step.verify()
    run, values = lower(step), values_for(step)
    values[2].fill_(torch.nan)
    before = [v.clone() for v in values]
    with pytest.raises(NotFinite):
        run(list(values))
    assert all(torch.equal(a, b) or a.isnan().all() for a, b in zip(before, values))
    values[2].fill_(1.0)
    run(list(values))
    assert torch.equal(values[1], before[1] + 1)


def test_codes_that_were_written_in_place_are_put_back():
    """One layer is trained before the other packs an activation."""
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    opt = memopt.optim.AdamW(first.parameters(), state_bits=8)
    other = torch.optim.SGD(second.parameters(), lr=0.1)

    def train(x, y):
        first(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        loss = torch.tanh(second(y)).square().mean()
        loss.backward()
        other.step()
        other.zero_grad()
        return loss

    step = captured(train, torch.randn(8, 64), torch.randn(8, 64))
    Canonicalize().run(step)
    UpdateInPlace().run(step)
    packed(step)
    assert "quantized_update_" in step.op_counts() and CheckFinite().requires(step) is None
    CheckFinite().run(step)
    step.verify()
    run, values = eager.lower(step), values_for(step)
    for value, node in zip(values, step.placeholders):
        if step.roles()[node] is Role.BATCH:
            bad = value  # the last is y
    bad.fill_(torch.nan)
    before = [v.clone() for v in values]
    with pytest.raises(NotFinite):
        run(list(values))
    assert all(torch.equal(a, b) or a.isnan().all() for a, b in zip(before, values))


def test_what_would_have_to_be_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(check_finite, "LARGEST", 8)
    assert "16 B of the step's inputs are written before" in CheckFinite().requires(counting())


def test_outliers_leave_the_step_in_pieces():
    """An operator that writes in place what the step makes would keep it from being cut."""
    step = packed(two_layers(), "int4 outliers")
    assert can_cut(inlined(step, inductor.decompositions()))


@pytest.mark.thorough
def test_what_is_kept_without_few_bits_is_kept_where_they_are_allowed():
    """Copies of AdamA's states, to take the step back, are more than these few bits save."""
    torch.manual_seed(0)
    layers = [m for _ in range(2) for m in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    opt = torch.optim.AdamW(model.parameters())

    def step(x, y):
        for a, b in memopt.micro_batches(2, x, y):
            F.cross_entropy(model(a), b).backward()
        opt.step()
        opt.zero_grad()

    args = torch.randn(256, 32), torch.arange(256) % 5
    asked = {"lowering": "eager", "accumulate": "optimizer_states"}
    (exact,) = memopt.explain(step, *args, memory_budget=[1000], **asked).points
    report = memopt.explain(step, *args, memory_budget=exact.peak_bytes, compress="int4", **asked)
    assert report.predicted_peak_bytes <= report.budget_bytes == exact.peak_bytes and not report.plan.largest_error
