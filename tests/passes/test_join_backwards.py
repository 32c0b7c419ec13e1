from functools import partial
from unittest import mock

import pytest
import torch
from graphs import by_hand, captured, check, gradient, seed
from torch import nn
from torch.nn import functional as F

import memopt_compile as memopt
from memopt_compile.passes.join_backwards import JoinBackwards
from memopt_compile.step_graph import Phase

aten = torch.ops.aten


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def two_losses_by_hand():
    """Two backwards through four times exp."""
    def step(p, x):
        values = [x * p]
        for _ in range(4):
            values.append(values[-1].exp())
        total, of_p = values[-1].sum(), []
        for loss in (total, total * 2):
            flow = seed(loss)
            for value in reversed(values[1:]):
                flow = flow * value
            of_p.append(gradient((flow * x).sum(0)))
        return total, of_p[0] + 2 * of_p[1]

    return by_hand(step, ("p", doubles(4)), ("x", doubles(16, 4)))


def test_golden():
    """8 bytes more with activations that stay, so that it takes a limit: without them two in place of four."""
    step = two_losses_by_hand()
    check(step, JoinBackwards(peak_bytes=0), slack=8)
    assert step.text() == """\
p0: f64[4]  # parameter trained
x0: f64[16, 4]  # batch
forward:
  mul_0: f64[16, 4] = mul(x0, p0)
  exp_0: f64[16, 4] = exp(mul_0)
  exp_1: f64[16, 4] = exp(exp_0)
  exp_2: f64[16, 4] = exp(exp_1)
  exp_3: f64[16, 4] = exp(exp_2)
  sum_0: f64[] = sum(exp_3)
  mul_1: f64[] = mul(sum_0, 2)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  mul_2: f64[16, 4] = mul(full_0, exp_3)
  full_1: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  mul_3: f64[16, 4] = mul(full_1, exp_3)
  mul_4: f64[16, 4] = mul(mul_2, exp_2)
  mul_5: f64[16, 4] = mul(mul_3, exp_2)
  mul_6: f64[16, 4] = mul(mul_4, exp_1)
  mul_7: f64[16, 4] = mul(mul_5, exp_1)
  mul_8: f64[16, 4] = mul(mul_6, exp_0)
  mul_9: f64[16, 4] = mul(mul_7, exp_0)
  mul_10: f64[16, 4] = mul(mul_9, x0)
  sum_1: f64[4] = sum.dim_IntList(mul_10, [0])
  mul_11: f64[16, 4] = mul(mul_8, x0)
  sum_2: f64[4] = sum.dim_IntList(mul_11, [0])
update:
  mul_12: f64[4] = mul(sum_1, 2)
  add_0: f64[4] = add(sum_2, mul_12)
return sum_0, add_0
"""


def test_what_fits_or_gets_no_better_stays():
    step = two_losses_by_hand()
    text = step.text()
    for each in (JoinBackwards(), JoinBackwards(peak_bytes=2**20)):
        check(step, each)
        assert step.text() == text


class TwoHeads(nn.Module):
    def __init__(self, layers=4, width=32, dropout=0.1):
        super().__init__()
        self.body = nn.Sequential(*[m for _ in range(layers) for m in (
            nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))])
        self.heads = nn.ModuleList(nn.Linear(width, n) for n in (10, 5))


def made(kind, **settings):
    """A step with two losses, `kind` says how they go back, and its arguments."""
    torch.manual_seed(0)
    model = TwoHeads(**settings).double()
    parameters = list(model.parameters())
    opt = torch.optim.AdamW(parameters, lr=1e-3)

    def step(x, *labels):
        opt.zero_grad()
        hidden = model.body(x)
        heads = (F.cross_entropy(head(hidden), y) for head, y in zip(model.heads, labels))
        if kind == "late":  # the second loss is made behind the first one's backward
            losses = []
            for loss in heads:
                loss.backward(retain_graph=not losses)
                losses.append(loss)
        elif kind == "accumulated":
            losses = list(heads)
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        else:  # each task's gradients, but for what is against the other's
            losses = list(heads)
            ours, theirs = (torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True,
                                                materialize_grads=True) for loss in losses)
            for p, a, b in zip(parameters, ours, theirs):
                p.grad = a + b - (a * b).sum().clamp(max=0) / (b.square().sum() + 1e-9) * b
        opt.step()
        return losses[0].detach() + losses[1].detach()

    generator = torch.Generator().manual_seed(1)
    return step, (torch.randn(128, 32, generator=generator, dtype=torch.float64),
                  *(torch.randint(n, (128,), generator=generator) for n in (10, 5))), model


@pytest.mark.parametrize("kind", ["accumulated", "late", "apart"])
def test_the_peak_falls_and_numbers_stay(kind):
    step, args, _ = made(kind)
    before, after = check(captured(step, *args), JoinBackwards())
    assert after < before


@pytest.mark.parametrize("kind", ["late", "apart"])
@pytest.mark.table(4)
def test_activations_run_again_for_both(kind):
    """Eager's numbers, dropout too, where activations would have to be held from one backward to the other."""
    def trained(lowered):
        step, args, model = made(kind)
        torch.manual_seed(2)
        fast = lowered(step)
        return [fast(*args) for _ in range(3)] + list(model.parameters()), fast

    expected, _ = trained(lambda step: step)
    _, free = trained(partial(memopt.compile, lowering="eager"))
    resident = memopt.report(free).resident_bytes
    budget = resident + (memopt.report(free).predicted_peak_bytes - resident) * 7 // 10
    got, fast = trained(partial(memopt.compile, lowering="eager", memory_budget=budget))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    assert memopt.report(fast).predicted_peak_bytes <= budget
    with mock.patch.object(JoinBackwards, "requires", lambda self, step: "left out"), pytest.raises(memopt.InfeasibleBudget):
        torch._dynamo.reset()
        memopt.compile(made(kind)[0], lowering="eager", memory_budget=budget)(*made(kind)[1])


def test_values_for_a_later_backward_are_forwards():
    """What only the backward behind it reads, such as the sum of a loss's weights, is no part of the update."""
    step, args, _ = made("late")
    graph = captured(step, *args)
    *_, second = graph.graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default)
    assert Phase.UPDATE not in {graph.phase(a) for a in second.all_input_nodes if a.op != "placeholder"}


def losses_of_micro_batches(model, x):
    for part in x.chunk(2):
        model(part).square().mean().backward()


def with_casts(model, x):
    """What autocast makes of parameters is there for both micro-batches."""
    with torch.autocast("cpu", torch.bfloat16):
        losses_of_micro_batches(model, x)


@pytest.mark.parametrize("backwards", [lambda model, x: model(x).square().mean().backward(), losses_of_micro_batches, with_casts],
                         ids=["one", "micro-batches", "casts"])
def test_nothing_to_join(backwards):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        backwards(model, x)
        opt.step()
        opt.zero_grad()

    assert JoinBackwards().requires(captured(step, torch.randn(4, 8))) == "no two backwards read one activation"
