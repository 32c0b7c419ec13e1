"""A state that several gradients enter is written after each, and never where it would show."""

import pytest
import torch
from graphs import (
    adama,
    by_hand,
    check,
    gradient,
    mlp,
    outcome,
    seed,
    training_step,
    values_for,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.passes.write_back_early import WriteBackEarly
from memopt_compile.step_graph import Phase

LAYERS, WIDTH = 6, 32
PASSES = (Canonicalize(), WriteBackEarly(), ReleaseGradients(), ScheduleForPeak())


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def two_backwards(first=torch.add, handed_out=False, last=lambda m2, m: m2):
    """A momentum that two gradients enter one after the other."""

    def step(p, m, x):
        of_0 = gradient(x * seed(torch.sum(x * p)))
        of_1 = gradient(p.sin() * seed(torch.sum(x + p)))
        m1 = first(m, of_0)
        m2 = m1 + of_1
        m.copy_(last(m2, m))
        p.copy_(p - m2)
        return [m1] if handed_out else []

    return by_hand(step, ("p", doubles(4)), ("s", doubles(4)), ("x", doubles(4)))


def test_golden():
    step = two_backwards()
    check(step, WriteBackEarly())
    assert step.text().split("backward:\n", 1)[1] == """\
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  mul_1: f64[4] = mul(x0, full_0)
  add_0: f64[4] = add(s0, mul_1)
  copy_0: f64[4] = copy_(s0, add_0)
forward:
  sin_0: f64[4] = sin(p0)
  add_1: f64[4] = add(x0, p0)
  sum_1: f64[] = sum(add_1)
backward:
  full_1: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  mul_2: f64[4] = mul(sin_0, full_1)
update:
  add_2: f64[4] = add(copy_0, mul_2)
  copy_1: f64[4] = copy_(copy_0, add_2)
  sub_0: f64[4] = sub(p0, add_2)
  copy_2: f64[4] = copy_(p0, sub_0)
return 
"""


def test_a_state_that_is_overwritten_unread_has_each_value():
    step = two_backwards(first=lambda m, of_0: of_0 * 2)
    check(step, WriteBackEarly())
    assert "add(copy_0, mul_" in step.text()  # m1 is read where m is
    assert untouched(two_backwards(first=lambda m, of_0: of_0 * 2, last=lambda m2, m: m2 + m))


def test_of_states_that_are_alike_each_has_its_own_values():
    """r enters s: what the step writes to s at its end is computed from earlier values of both."""
    def body(p, r, s, x):
        of_0 = gradient(x * seed(torch.sum(x * p)))
        of_1 = gradient(p.sin() * seed(torch.sum(x + p)))
        r1 = r * 0.5 + of_0
        s1 = s * 0.25 + of_0 / r1
        r2 = r1 * 0.5 + of_1
        s2 = s1 * 0.25 + of_1 / r2
        r.copy_(r2)
        s.copy_(s2)
        p.copy_(p - s2)

    step = by_hand(body, ("p", doubles(4)), *(("s", doubles(4)) for _ in range(2)), ("x", doubles(4)))
    check(step, WriteBackEarly())
    copies = [n for n in step.computing() if n.target is torch.ops.aten.copy_.default]
    early = [n for n in copies if step.phase(n) is Phase.BACKWARD]
    assert len(early) == 2 and len(copies) == 5
    assert {n.args[0].name for n in early} == {"r_1", "s_1"}


def untouched(step):
    text = step.text()
    WriteBackEarly().run(step)
    return step.text() == text


def test_nothing_to_do():
    assert untouched(training_step(mlp(2), micro_batches=2))


@pytest.mark.parametrize("step", [
    two_backwards(handed_out=True),
    two_backwards(first=lambda m, of_0: m + of_0 * torch.rand_like(m)),
    two_backwards(last=lambda m2, m: m2 + m),
], ids=["the value is returned", "random numbers would move", "the old state is read later"])
def test_left_alone_where_it_would_show(step):
    assert untouched(step)


@settings(max_examples=5, deadline=None)
@given(n=st.sampled_from([1, 2, 4, 8]))
def test_numbers_stay_and_the_peak_falls(n):
    step = adama(mlp(LAYERS, WIDTH), doubles(8, WIDTH), n)
    values = values_for(step)
    expected = outcome(eager.lower(step), values)
    for each in PASSES:
        each.run(step)
        step.verify()
    got = outcome(eager.lower(step), values)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)
               if isinstance(a, torch.Tensor))
    forward = max(p.live_bytes for p in timeline(step).points if p.phase is Phase.FORWARD)
    layer = WIDTH * WIDTH * 8
    assert timeline(step).transient_peak_bytes < forward + 6 * layer


def test_a_model_is_refused():
    step = two_backwards()
    step.kind = "model"
    assert "update" in WriteBackEarly().requires(step)


def test_codes_are_written_where_they_are_decoded():
    """What is complete later reads the decoded value only, which is of another type."""
    def body(p, m, x):
        of_0 = gradient(x * seed(torch.sum(x * p)))
        of_1 = gradient(p.sin() * seed(torch.sum(x + p)))
        m1 = (m.to(torch.float64) / 16 + of_0).to(torch.float32)
        m2 = (m1.to(torch.float64) / 16 + of_1).to(torch.float32)
        m.copy_(m2)
        p.copy_(p - m2.to(torch.float64))

    step = by_hand(body, ("p", doubles(4)), ("s", torch.rand(4)), ("x", doubles(4)))
    check(step, WriteBackEarly())
    early, *others = [n for n in step.computing() if n.target is torch.ops.aten.copy_.default]
    assert len(others) == 2 and step.phase(early) is Phase.BACKWARD
    assert early.args[1].users.keys() == {early}  # nothing else keeps the codes alive
