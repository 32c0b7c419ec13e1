import pytest
import torch
from graphs import by_hand, check, gradient, seed, training_step
from torch import nn

from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.rematerialize_free import RematerializeFree
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.passes.split_live_ranges import SplitLiveRanges

aten = torch.ops.aten


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


INPUTS = ("p", doubles(4, 8)), ("p", doubles(8, 32)), ("x", doubles(8, 4))


def step_by_hand(between=aten.tanh, late=lambda hidden: hidden.cos()):
    """Backward reads `between` of a product after the widest moment, and then `late` of the product."""
    def step(p, w, x):
        hidden = torch.mm(x, p)
        read_twice = between(hidden)
        wide = torch.mm(read_twice, w)
        loss = (wide * wide).sum()
        upstream = aten.expand(seed(loss), (8, 32))
        of_w = torch.mm(read_twice.t(), upstream)
        return loss, gradient(of_w), gradient(torch.mm(x.t(), torch.mm(upstream, w.t()) * late(hidden)))

    return by_hand(step, *INPUTS)


def test_golden():
    step = step_by_hand()
    before, after = check(step, SplitLiveRanges())
    assert before - after == 8 * 8 * 8
    assert step.text() == """\
p0: f64[4, 8]  # parameter trained
p1: f64[8, 32]  # parameter trained
x0: f64[8, 4]  # batch
forward:
  mm_0: f64[8, 8] = mm(x0, p0)
  tanh_0: f64[8, 8] = tanh(mm_0)
  mm_1: f64[8, 32] = mm(tanh_0, p1)
  mul_0: f64[8, 32] = mul(mm_1, mm_1)
  sum_0: f64[] = sum(mul_0)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[8, 32] = expand(full_0, [8, 32])
  tanh_1: f64[8, 8] = tanh(mm_0)
  t_0: f64[8, 8] = t(tanh_1)
  mm_2: f64[8, 32] = mm(t_0, expand_0)
  t_1: f64[4, 8] = t(x0)
  t_2: f64[32, 8] = t(p1)
  mm_3: f64[8, 8] = mm(expand_0, t_2)
  cos_0: f64[8, 8] = cos(mm_0)
  mul_1: f64[8, 8] = mul(mm_3, cos_0)
  mm_4: f64[4, 8] = mm(t_1, mul_1)
return sum_0, mm_2, mm_4
"""


def test_all_that_has_died_is_computed_again():
    step = step_by_hand(lambda hidden: (hidden.tanh() * 2).sin())
    before, after = check(step, SplitLiveRanges())
    assert before - after == 8 * 8 * 8
    assert {name: step.op_counts()[name] for name in ("tanh", "mul", "sin")} == {"tanh": 2, "mul": 4, "sin": 2}


@pytest.mark.parametrize("settings", [
    {"late": lambda hidden: 1},  # what it is computed from has died
    {"between": lambda hidden: aten.bernoulli.p(hidden, 0.5)},  # another draw
    {"between": lambda hidden: hidden.softmax(1)},  # does not fuse
    {"between": lambda hidden: hidden[:1].exp().expand(8, 8)},  # too small
], ids=["dead", "random", "unfused", "small"])
def test_holds_what_cannot_be_had_again(settings):
    step = step_by_hand(**settings)
    text = step.text()
    check(step, SplitLiveRanges())
    assert step.text() == text


def test_reads_nothing_that_was_overwritten():
    def step(p, w, x):
        read_twice = p.tanh()
        wide = torch.mm(torch.mm(x, read_twice), w)
        loss = (wide * wide).sum()
        p.copy_(p * 2)
        return loss, torch.mm(read_twice, w)

    graph = by_hand(step, *INPUTS)
    text = graph.text()
    check(graph, SplitLiveRanges())
    assert graph.text() == text


class Residual(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
                                   for _ in range(2))

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.table(4)
def test_sums_of_a_residual_network(micro_batches):
    """Each sum reads the one before: with all of them at hand, backward begins at its peak."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 1), *(Residual() for _ in range(3)),
                          nn.Flatten(), nn.Linear(128, 4)).double()
    step = training_step(model, batch=64, lowering="inductor", micro_batches=micro_batches)
    check(step, Canonicalize(), RematerializeFree(), ReleaseGradients(), ScheduleForPeak(), slack=64)
    before, after = check(step, SplitLiveRanges())
    assert after < 0.95 * before
    assert check(step, SplitLiveRanges()) == (after, after)
