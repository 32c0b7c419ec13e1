import dataclasses
import functools

import pytest
import torch
from graphs import (
    by_hand,
    check,
    gradient,
    mlp,
    outcome,
    seed,
    training_step,
    two_layers,
    values_for,
)
from torch import nn

from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.memory_plan import MemoryPlan
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.plan_memory import PlanMemory
from memopt_compile.passes.recompute import Recompute
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.planning.rematerialization import problem
from memopt_compile.seconds import roofline
from memopt_compile.step_graph import Phase

CPU = torch.device("cpu")


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def plan(*again):
    return MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(again))


def test_golden():
    step = two_layers()
    step.plan = plan("mm", "tanh")
    check(step, Recompute())
    assert step.text() == """\
p0: f64[4, 4]  # parameter trained
p1: f64[4, 4]  # parameter trained
x0: f64[8, 4]  # batch
forward:
  mm_0: f64[8, 4] = mm(x0, p0)
  tanh_0: f64[8, 4] = tanh(mm_0)
  mm_1: f64[8, 4] = mm(tanh_0, p1)
  sum_0: f64[] = sum(mm_1)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[8, 4] = expand(full_0, [8, 4])
  mm_2: f64[8, 4] = mm(x0, p0)
  tanh_1: f64[8, 4] = tanh(mm_2)
  t_0: f64[4, 8] = t(tanh_1)
  mm_3: f64[4, 4] = mm(t_0, expand_0)
  t_1: f64[4, 8] = t(x0)
  t_2: f64[4, 4] = t(p1)
  mm_4: f64[8, 4] = mm(expand_0, t_2)
  cos_0: f64[8, 4] = cos(mm_2)
  mul_0: f64[8, 4] = mul(mm_4, cos_0)
  mm_5: f64[4, 4] = mm(t_1, mul_0)
return sum_0, mm_3, mm_5
"""


def test_refusals():
    step = two_layers()
    assert "nothing is to run again" in Recompute().requires(step)
    step.plan = plan()
    assert "nothing is to run again" in Recompute().requires(step)
    step.plan = plan("never")
    assert "never" in Recompute().ensures(step)


def prepared(model, **settings):
    step = training_step(model, **settings)
    for each in (Canonicalize(), ReleaseGradients(), ScheduleForPeak()):
        each.run(step)
    return step


def budgeted(step, share):
    """Plan and rewrite `step` for a share of its transient peak; the plan."""
    before = timeline(step)
    limit = before.resident_bytes + int(share * before.transient_peak_bytes)
    check(step, PlanMemory(limit, CPU))
    if step.plan is not None:
        check(step, Recompute())
        assert timeline(step).transient_peak_bytes == step.plan.peak_bytes
    return step.plan


def gelus(layers=8, width=32):
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(width, 4)).double()


@functools.cache
def eight_gelus(**settings):
    """Captured once for all shares."""
    return prepared(gelus(), batch=128, **settings)


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
@pytest.mark.parametrize("settings", [{}, {"clip": 1.0}, {"micro_batches": 2}], ids=str)
@pytest.mark.table(6)
def test_the_peak_falls_to_the_limit(share, settings):
    step = eight_gelus(**settings).copy()
    limit = int(share * timeline(step).transient_peak_bytes)
    found = budgeted(step, share)
    assert found.fits and found.peak_bytes <= limit
    assert found.chosen("recompute") and found.chosen("keep")


def test_a_step_that_fits_has_no_plan():
    assert budgeted(prepared(mlp()), 1.0) is None


def test_without_backward_there_is_nothing_to_plan():
    step = by_hand(lambda p: (p * 2,), ("p", doubles(4)))
    assert "no backward" in PlanMemory(1, CPU).requires(step)


def test_the_smallest_peak_where_nothing_fits():
    step = prepared(gelus(), batch=128)
    before = timeline(step).transient_peak_bytes
    found = budgeted(step, 0.01)
    assert not found.fits and found.peak_bytes < 0.6 * before


def test_no_random_number_is_drawn_again():
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (
        nn.Linear(32, 32), nn.Dropout(0.5), nn.GELU())], nn.Linear(32, 4)).double()
    step = prepared(model, batch=128)
    draws = sum("dropout" in str(n.target) and "backward" not in str(n.target)
                for n in step.computing())
    found = budgeted(step, 0.8)
    assert found.chosen("recompute")
    assert draws == 6 == sum("dropout" in str(n.target) and "backward" not in str(n.target)
                             for n in step.computing())


def test_a_recurrent_network_of_cudnn_never_runs_again():
    """Its dropout would draw another mask. What it computes is no matter here, only its operator, which CUDA alone has."""
    lstm = torch.ops.aten._cudnn_rnn.default

    def compute(p: torch.Tensor, x: torch.Tensor) -> tuple:
        state, drawn = torch.zeros(2, 3, 8), torch.zeros(10, dtype=torch.uint8)
        y = lstm(x, [p] * 8, 4, None, state, state, 2, 8, 0, 2, False, 0.3, True, False, [], drawn)[0].tanh()
        return seed(y.sum()), gradient(y.sum(0))

    step = by_hand(compute, ("p", torch.rand(32, 8)), ("x", torch.rand(5, 3, 8)))
    again = {operation.node.target: operation.again for operation in problem(step, roofline(CPU)).operations}
    assert again[torch.ops.aten.tanh.default] and not again[lstm]


@torch.library.custom_op("memopt_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient * ctx.saved_tensors[0],
                        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
                            output / inputs[0]))


def branching(x):
    return torch.cond(x.sum() > -1e9, lambda x: x * torch.rand_like(x), torch.sin, (x,))


class Noisy(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise, self.layers = noise, nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers:
            x = self.noise(torch.tanh(layer(x)))
        return self.last(x)


@pytest.mark.parametrize("noise", [noisy, branching], ids=["operator", "branch"])
def test_what_may_draw_numbers_runs_once(noise):
    """PyTorch's operators say that they do. Those of others do not, nor does one with a body."""
    found = problem(prepared(Noisy(noise).double()), roofline("cpu"))
    drawing = [o for o in found.operations if getattr(o.node.target, "namespace", "aten") != "aten"]
    assert len(drawing) == 3 and not any(o.again for o in drawing)
    assert any(o.again for o in found.operations)


class Normed(nn.Module):
    """Batch normalization in training mode overwrites its statistics in forward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(torch.relu(self.norm(torch.relu(self.first(x)))))


def test_what_reads_overwritten_statistics_runs_once():
    torch.manual_seed(0)
    step = prepared(Normed().double(), batch=256)
    budgeted(step, 0.6)
    copies = sum("batch_norm" in str(n.target) and "backward" not in str(n.target)
                 for n in step.computing())
    assert copies == 1


def test_plans_print():
    step = prepared(gelus(), batch=128)
    found = budgeted(step, 0.6)
    assert f"of {len(found.decisions)} activations" in str(found)
    assert "recompute" in found.table() and "f64[128, 32]" in found.table()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.seconds = 0


def test_a_copy_of_a_step_is_the_same_step():
    step = prepared(gelus(), batch=16)
    values = values_for(step)
    twin = step.copy()
    assert twin.text() == step.text()
    twin.verify()
    assert [n.name for n in twin.gradients] == [n.name for n in step.gradients]
    for a, b in zip(outcome(eager.lower(step), values), outcome(eager.lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    budgeted(twin, 0.6)
    assert twin.text() != step.text() and step.plan is None
    assert all(step.phase(n) in Phase for n in step.computing())
