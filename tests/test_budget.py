"""A byte budget from outside: what the user asks for, gets, or is told."""

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memopt_compile as memopt
from memopt_compile import devices, pipelines
from memopt_compile.quantization.named import FORMATS
from memopt_compile.records import compilations
from memopt_compile.reporting.frontier import Frontier

# By a name of its own: the coverage tests have a module `models` too.
SPEC = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[1] / "examples" / "models.py")
models = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(models)


def make(dropout=0.1, layers=3, micro_batches=1, dtype=torch.float64, vocabulary=40):
    """A fresh GPT's step and its arguments, always from the same numbers."""
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(vocabulary, layers, 32, 2, 32, dropout)).to(dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        for inputs, targets in memopt.micro_batches(micro_batches, x, y):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / micro_batches).backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    tokens = torch.randint(vocabulary, (16, 32))
    return step, (tokens, tokens.roll(-1, 1)), model


def small(micro_batches=1, dtype=torch.float64):
    """The same of a few layers with dropout, which are planned in a fraction of the time."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]).to(dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        for inputs, targets in memopt.micro_batches(micro_batches, x, y):
            loss = F.cross_entropy(model(inputs), targets)
            (loss / micro_batches).backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, (torch.randn(512, 32, dtype=dtype), torch.randint(32, (512,))), model


def trained(budget, lowering="eager", made=None, **kind):
    """Loss of each step, the parameters and the report after three steps under `budget`."""
    torch._dynamo.reset()
    step, args, model = made() if made else make(**kind)
    fast = memopt.compile(step, lowering=lowering, memory_budget=budget)
    losses = [fast(*args).item() for _ in range(3)]
    return losses, [p.detach() for p in model.parameters()], memopt.report(fast)


@pytest.fixture(scope="module", params=[
    {}, {"micro_batches": 2}, pytest.param({"dropout": 0.0}, marks=pytest.mark.thorough)], ids=str)
def free(request):
    return request.param, trained(None, **request.param)


def test_metrics_behind_the_step():
    """Numbers that are read there are read when it has run."""
    step, args, _ = small()

    def with_metrics(x, y):
        loss = step(x, y)
        return {"loss": loss.item(), "perplexity": loss.exp().item(), "share": (y == 0).float().mean().item()}

    free = memopt.explain(step, *args, lowering="eager")
    budget = between(free, 0.9)
    fast = memopt.compile(with_metrics, lowering="eager", memory_budget=budget)
    assert fast(*args)["perplexity"] > 1
    report = memopt.report(fast)
    assert report.kind == "step" and report.plan and report.measured_peak_bytes <= budget


def test_a_backward_in_another_graph_than_its_forward_is_refused(caplog):
    step, args, model = make(layers=1)

    def twice(x, y):
        print(step(x, y).item())  # the first step is whole
        logits = model(x)
        print("a second forward")
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()

    fast = memopt.compile(twice, lowering="eager", memory_budget="1GiB")
    with pytest.raises(memopt.OptionError, match="budget cannot be kept"):
        fast(*args)
    assert "memory_budget is for a whole step. Remedy: " in caplog.text and "right numbers" not in caplog.text


def between(report, share):
    beyond = (report.measured_peak_bytes or report.predicted_peak_bytes) - report.resident_bytes
    return report.resident_bytes + int(share * beyond)


@pytest.mark.table(4)
def test_kept_exactly_and_bit_by_bit_with_dropout(free):
    kind, (losses, parameters, report) = free
    budget = between(report, 0.6)
    got_losses, got, found = trained(budget, **kind)
    assert found.measured_peak_bytes <= budget == found.budget_bytes
    assert found.predicted_peak_bytes == found.measured_peak_bytes
    assert got_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, got))
    assert found.plan.chosen("recompute") and "computed again" in str(found)
    assert any("models.py" in (d.line or "") for d in found.plan.decisions)


def test_a_step_that_fits_is_left_alone():
    """Down to its own peak, which it has once it writes into dead buffers."""
    step, args, _ = small()
    peak = memopt.explain(step, *args, lowering="eager").predicted_peak_bytes
    fits, less = memopt.explain(step, *args, lowering="eager", memory_budget=[peak, peak - 1]).points
    assert fits.peak_bytes == peak and not fits.seconds
    assert less.peak_bytes < peak and less.seconds > 0


def test_a_refusal_names_the_smallest_peak_and_that_one_works():
    _, _, report = trained(None, made=small)
    with pytest.raises(memopt.InfeasibleBudget, match="smallest peak found") as refusal:
        trained(report.resident_bytes + 1000, made=small)
    for price in ("compress='int4': ", "halve the batch"):
        assert price in refusal.value.do
    assert "state_bits=8" not in refusal.value.do  # the state is in float64, which memopt.optim does not shorten
    assert re.search(r"there before the step .* at that peak are [0-9]+ × f64\[512, 32\] of .*test_budget.py:", refusal.value.what)
    least = memopt.explain(small()[0], *small()[1], lowering="eager", memory_budget=[
        report.resident_bytes + 1000]).points[0].peak_bytes
    _, _, found = trained(least, made=small)
    assert found.measured_peak_bytes <= least
    assert refusal.value.smallest_peak_bytes == least and refusal.value.resident_bytes == report.resident_bytes
    assert refusal.value.budget_bytes == report.resident_bytes + 1000
    told = re.search(r"raise memory_budget to ([0-9.]+ [KM]iB)", refusal.value.do)[1]
    assert trained(told, made=small)[2].measured_peak_bytes == found.measured_peak_bytes


@pytest.mark.parametrize("optimizer, offered", [
    (torch.optim.AdamW, True), (partial(memopt.optim.AdamW, state_bits=8), False)], ids=["32 bits", "8 bits"])
def test_states_of_8_bits_are_offered_to_who_has_32(optimizer, offered):
    model = torch.nn.Linear(128, 128)
    opt = optimizer(model.parameters(), lr=1e-3)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    with pytest.raises(memopt.InfeasibleBudget) as refusal:
        memopt.explain(step, torch.ones(64, 128), lowering="eager", memory_budget="1KiB")
    assert ("state_bits=8: about " in refusal.value.do) is offered
    least = memopt.explain(step, torch.ones(64, 128), lowering="eager", memory_budget=[1]).points[0].peak_bytes
    with pytest.raises(memopt.InfeasibleBudget, match="iB, 1 B less; "):
        memopt.explain(step, torch.ones(64, 128), lowering="eager", memory_budget=least - 1)


def test_auto_is_what_is_there_and_what_is_free(monkeypatch):
    """What the step holds already is not free, and is part of its peak."""
    step, args, _ = small()
    plain = memopt.explain(step, *args, lowering="eager")
    free = iter([plain.predicted_peak_bytes - plain.resident_bytes, 1, 1])
    monkeypatch.setattr(devices, "free_bytes", lambda device: next(free))
    found = memopt.explain(step, *args, lowering="eager", memory_budget="auto")
    assert found.budget_bytes == int(0.9 * plain.predicted_peak_bytes)  # asked for once
    assert found.predicted_peak_bytes <= found.budget_bytes


def test_without_recomputation_the_step_is_refused():
    step, args, _ = small()
    with pytest.raises(memopt.InfeasibleBudget, match="recompute=False"):
        memopt.explain(step, *args, lowering="eager", memory_budget=0.5, recompute=False)


def test_a_model_alone_has_no_budget():
    model = make()[2]
    with pytest.raises(memopt.OptionError, match="no backward"):
        memopt.compile(model, memory_budget="1GiB")(torch.zeros(1, 8, dtype=torch.int64))


def test_a_step_in_parts_has_no_budget():
    step, args, model = make()

    def broken(x, y):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        torch._dynamo.graph_break()
        loss.backward()
        return loss

    with pytest.raises(memopt.MemoptError, match="budget cannot be kept"):
        memopt.compile(broken, lowering="eager", memory_budget="1GiB")(*args)


@pytest.fixture(scope="module")
def frontier():
    step, args, _ = small()
    return memopt.explain(step, *args, lowering="eager", memory_budget=[1.0, 0.9, 0.8, 0.6, 0.3])


def test_the_frontier_is_monotone(frontier):
    assert isinstance(frontier, Frontier)
    points = frontier.points
    assert [p.budget_bytes for p in points] == sorted({p.budget_bytes for p in points}, reverse=True)
    for larger, smaller in zip(points, points[1:]):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.seconds >= larger.seconds * 0.99
    assert points[0].fits and not points[-1].fits
    assert all(p.peak_bytes > frontier.resident_bytes for p in points)


def test_the_smallest_peak_is_at_most_that_of_a_larger_budget(monkeypatch):
    """Though the search for the smaller one has not come by it."""
    step, args, _ = small()
    budget, plan = between(memopt.explain(step, *args, lowering="eager"), 0.9), pipelines.rewritten
    monkeypatch.setattr(pipelines, "rewritten", lambda step, options, lowering, costs, limit, *more, **named: plan(
        step, options, lowering, costs, limit if limit == budget else pipelines.ANY, *more, **named))
    kept, refused = memopt.explain(step, *args, lowering="eager", memory_budget=[budget, 1]).points
    assert kept.fits and not refused.fits
    assert (refused.budget_bytes, refused.peak_bytes, refused.seconds) == (1, kept.peak_bytes, kept.seconds)


def test_logits_go_by_parts_where_that_is_faster_than_to_compute_more_again():
    """Else a smaller budget, which only parts can keep, would have the faster step."""
    step, args, _ = make(layers=2, vocabulary=1000)
    points = memopt.explain(step, *args, lowering="eager", memory_budget=[0.9, 0.5]).points
    assert all(p.fits and not p.seconds for p in points)
    changed = {p.name for p in memopt.explain(step, *args, lowering="eager", memory_budget=0.9).passes if p.op_changes}
    assert "chunk_logits" in changed and "recompute" not in changed


def test_the_frontier_prints_and_draws(frontier, tmp_path):
    assert "planned peak" in str(frontier) and "no: the smallest found" in str(frontier)
    frontier.draw(tmp_path / "frontier.svg")
    drawn = (tmp_path / "frontier.svg").read_text()
    assert drawn.count("<circle") == len({(p.seconds, p.peak_bytes) for p in frontier.points})
    assert "resident" in drawn


def test_a_frontier_needs_a_step():
    model = make()[2]
    with pytest.raises(memopt.MemoptError, match="no whole step"):
        memopt.explain(model, torch.zeros(1, 8, dtype=torch.int64), lowering="eager",
                       memory_budget=[0.5])


def test_every_batch_size_has_its_own_plan():
    step, (x, y), _ = small()
    free = memopt.explain(step, x, y, lowering="eager")
    budget = free.resident_bytes + int(0.7 * (free.predicted_peak_bytes - free.resident_bytes))
    torch._dynamo.reset()
    before = len(compilations(step.__code__))
    fast = memopt.compile(small()[0], lowering="eager", memory_budget=budget)
    for rows in (512, 256, 512, 384, 512, 256):
        fast(x[:rows], y[:rows])
    found = compilations(step.__code__)[before:]
    assert len(found) == 3 and any(r.step.plan is not None for r in found)
    assert all(r.measured_peak_bytes <= budget for r in found)


def test_with_gradients_folded_into_states():
    def folded(budget):
        torch._dynamo.reset()
        step, args, model = small(micro_batches=2)
        fast = memopt.compile(step, lowering="eager", accumulate="optimizer_states",
                              memory_budget=budget)
        for _ in range(3):
            fast(*args)
        return memopt.report(fast), [p.detach() for p in model.parameters()]

    free, expected = folded(None)
    found, got = folded(between(free, 0.7))
    assert found.measured_peak_bytes <= found.budget_bytes and found.plan.chosen("recompute")
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.inductor
def test_kept_on_inductor():
    made = partial(small, dtype=torch.float32)  # dropout too: seeds are kept
    _, parameters, report = trained(None, "inductor", made)
    budget = between(report, 0.85)
    _, got, found = trained(budget, "inductor", made)
    assert found.measured_peak_bytes <= budget
    assert found.plan.chosen("recompute")
    assert abs(found.predicted_peak_bytes / found.measured_peak_bytes - 1) < 0.03
    for a, b in zip(parameters, got):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.inductor
def test_gradients_on_inductor_are_those_without_a_budget_although_noise_is_drawn_again():
    """From its seeds, so that it is that of forward. In float32, relative to the gradients' norms. (Dropout's mask is
    kept in a bit an element, where that is enough.)"""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            hidden = F.dropout(F.gelu(self.up(x)), 0.3)
            return x + hidden * torch.rand_like(hidden)

    def gradients(budget):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4))
        opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step(x, y):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()

        fast = memopt.compile(step, lowering="inductor", memory_budget=budget)
        fast(torch.randn(512, 32), torch.randint(4, (512,)))
        # The first momentum is the gradient.
        return memopt.report(fast), [opt.state[p]["momentum_buffer"] for p in model.parameters()]

    free, expected = gradients(None)
    found, got = gradients(between(free, 0.6))
    assert found.measured_peak_bytes <= found.budget_bytes
    again = dict(next(p for p in found.passes if p.name == "recompute").op_changes)
    assert any("inductor_random" in name and count > 0 for name, count in again.items())
    for a, b in zip(expected, got):
        assert (a - b).norm() <= 1e-6 * a.norm() > 0


@pytest.mark.parametrize("compress", [None, "int4"])
@pytest.mark.table(4)
def test_tensors_without_elements(compress):
    """Activations, a parameter and a dropout of none, in a step that compresses and computes again."""
    def trained(budget, compress):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 256),
                              nn.GELU(), nn.Linear(256, 64))
        last, none = nn.Linear(64, 8), nn.Parameter(torch.zeros(0, 64))
        opt = torch.optim.AdamW([*model.parameters(), *last.parameters(), none])

        def step(x):
            hidden = model(x)
            nothing = F.gelu(last(hidden[:0])), F.gelu(torch.cat([none, none])), F.dropout(hidden[:, :0], 0.5)
            loss = hidden.square().mean() + sum(each.sum() for each in nothing)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        fast = memopt.compile(step, lowering="eager", memory_budget=budget, compress=compress)
        x = torch.randn(512, 64)
        return [float(fast(x)) for _ in range(3)], memopt.report(fast)

    (expected, free), (losses, report) = trained(None, None), trained(0.65, compress)
    assert free.kind == report.kind == "step" and report.measured_peak_bytes <= report.budget_bytes
    assert losses == expected if compress is None else losses == pytest.approx(expected, rel=1e-3)


@settings(max_examples=3, deadline=None)
@given(share=st.floats(0.55, 0.95))
def test_any_budget_is_kept_or_refused(share):
    step, args, _ = small()
    try:
        report = memopt.explain(step, *args, lowering="eager", memory_budget=share)
    except memopt.InfeasibleBudget:
        return
    assert report.predicted_peak_bytes <= report.budget_bytes


def test_compressed_gradients_are_compared_on_a_shadow_step():
    budget = between(trained(None, made=small)[2], 0.6)
    largest = {}
    for bound in (None, 0.05):
        torch._dynamo.reset()
        step, args, _ = small()
        fast = memopt.compile(step, lowering="eager", memory_budget=budget, verify=True, recompute=False,
                              compress="auto" if bound else "int4", max_gradient_error=bound)
        fast(*args)
        report = memopt.report(fast)
        error = report.gradient_error
        assert 0.99 < error.cosine <= 1 and 0 < error.relative < error.worst_relative < 0.2
        assert "cosine" in str(report)
        assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
        largest[bound] = report.plan.largest_error
    assert largest[None] > 0.1 and largest[0.05] == FORMATS["int8"].error
