"""Functions, or calls of one, that train nothing, under a budget: predicted, kept or refused like a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt

TOKENS = torch.arange(8 * 64).reshape(8, 64) % 82


def made(optimizer=torch.optim.SGD):
    """A step that trains or evaluates as it is told, its model, and a function that evaluates only."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(82, 64), *layers, nn.Linear(64, 82)).double()
    opt = optimizer(model.parameters(), lr=0.01)

    def loss_of(x):
        return F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())

    @torch.no_grad()
    def evaluate(x):
        return loss_of(x).item()

    def step(x, train=True):
        if not train:
            with torch.no_grad():
                return loss_of(x)
        loss = loss_of(x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, model, evaluate


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_a_step_that_evaluates_by_some_calls(lowering):
    step, model, _ = made()
    expected = [step(TOKENS, i % 3 < 2).item() for i in range(6)], [p.detach() for p in model.parameters()]
    step, _, _ = made()
    free = memopt.explain(step, TOKENS, lowering=lowering)
    budget = free.resident_bytes + int(0.7 * (free.predicted_peak_bytes - free.resident_bytes))
    step, model, _ = made()
    fast = memopt.compile(step, lowering=lowering, memory_budget=budget)
    got = [fast(TOKENS, i % 3 < 2).item() for i in range(6)], [p.detach() for p in model.parameters()]
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    report = memopt.report(fast)
    assert report.kind == "step"  # of what is there it has the most to say
    evaluation = [each for each in report.others if each.kind == "evaluation"][-1]
    for each in (report, evaluation):
        assert each.measured_peak_bytes == pytest.approx(each.predicted_peak_bytes, rel=0.01)
        assert each.measured_peak_bytes <= each.budget_bytes == budget
    assert "evaluation: no backward in it" in str(report)


def test_an_evaluation_alone_is_kept_or_refused():
    _, _, evaluate = made()
    expected = evaluate(TOKENS)
    needed = memopt.explain(evaluate, TOKENS, lowering="eager", memory_budget="1GiB").predicted_peak_bytes
    fast = memopt.compile(evaluate, lowering="eager", memory_budget=needed)
    assert fast(TOKENS) == pytest.approx(expected, rel=1e-12)
    assert memopt.report(fast).measured_peak_bytes == needed
    _, _, evaluate = made()
    with pytest.raises(memopt.InfeasibleBudget, match="raise memory_budget") as refusal:
        memopt.compile(evaluate, lowering="eager", memory_budget=needed - 1)(TOKENS)
    assert refusal.value.smallest_peak_bytes == needed


def test_a_share_is_of_what_a_step_can_give_up():
    _, _, evaluate = made()
    fast = memopt.compile(evaluate, lowering="eager", memory_budget=0.5)
    fast(TOKENS)
    report = memopt.report(fast)
    assert report.budget_bytes is None and report.predicted_peak_bytes == report.measured_peak_bytes


def test_gradients_may_be_folded_into_states_by_other_calls():
    step, _, _ = made(memopt.optim.Adam)
    fast = memopt.compile(step, lowering="eager", accumulate="optimizer_states")
    before, evaluated, after = (fast(TOKENS, train).item() for train in (True, False, True))
    assert evaluated == pytest.approx(after, rel=1e-12) and after < before


def test_a_part_of_a_step_has_no_budget():
    """What follows the forward may hold anything."""
    step, model, _ = made()

    def broken(x):
        with torch.no_grad():
            teacher = model(x)
        torch._dynamo.graph_break()
        F.mse_loss(model(x), teacher).backward()

    with pytest.raises(memopt.OptionError, match="budget cannot be kept"):
        memopt.compile(broken, lowering="eager", memory_budget="1GiB")(TOKENS)


def test_what_the_caller_can_differentiate_is_no_evaluation():
    """Its backward comes later, through what was given to be written to."""
    model = made()[1]

    def into(x, out):
        out.copy_(model(x))

    with pytest.raises(memopt.OptionError, match="budget cannot be kept"):
        memopt.compile(into, lowering="eager", memory_budget="1GiB")(TOKENS, torch.zeros(8, 64, 82).double())


def test_an_average_of_weights_and_memory_given_twice():
    """Changed under `no_grad`, before it is read."""
    def average(x, same):
        with torch.no_grad():
            same.mul_(2)
            for one in layer.parameters():
                one.mul_(0.5)
            return layer(x).sum()

    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4).double(), torch.ones(4, 4).double()
        run = memopt.compile(average, lowering="eager", memory_budget="1GiB") if compiled else average
        found.append([run(x, x.view(4, 4)) for _ in range(2)] + [x, layer.weight.detach()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)
