import torch
from graphs import by_hand, check, gradient, mlp, seed, training_step
from hypothesis import given
from hypothesis import strategies as st

from memopt_compile.liveness import lifetimes, timeline
from memopt_compile.ordering import predecessors, weight
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak, best_order, early, late


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def test_golden():
    def step(p, x):
        large = torch.mm(x, x.t())  # is read last, so it can be made last
        small = torch.mm(p, p)
        loss = small.sum()
        return loss + large.sum()

    graph = by_hand(step, ("p", doubles(16, 16)), ("x", doubles(32, 4)))
    before, after = check(graph, ScheduleForPeak())
    assert after < before
    assert (
        graph.text()
        == """\
p0: f64[16, 16]  # parameter trained
x0: f64[32, 4]  # batch
forward:
  t_0: f64[4, 32] = t(x0)
  mm_0: f64[32, 32] = mm(x0, t_0)
  sum_0: f64[] = sum(mm_0)
  mm_1: f64[16, 16] = mm(p0, p0)
  sum_1: f64[] = sum(mm_1)
  add_0: f64[] = add(sum_1, sum_0)
return add_0
"""
    )


def test_an_order_that_cannot_be_better_stays():
    step = by_hand(lambda x: x.sin().cos().sum(), ("x", doubles(8)))
    text = step.text()
    ScheduleForPeak().run(step)
    assert step.text() == text


def test_a_captured_step_gets_no_worse_and_keeps_its_numbers():
    step = training_step(mlp(6, 32))
    check(step, Canonicalize(), ReleaseGradients(), ScheduleForPeak(), slack=64)


def test_writes_stay_behind_reads_and_random_numbers_in_order():
    def step(p, x):
        noise = torch.ops.aten.bernoulli.p(x, 0.5)
        loss = (torch.mm(x, p) * noise).sum()
        of_p = gradient(torch.mm(x.t(), noise * seed(loss)))
        p.copy_(p - of_p)
        return loss, torch.ops.aten.bernoulli.p(x, 0.5)

    check(by_hand(step, ("p", doubles(4, 4)), ("x", doubles(4, 4))), ScheduleForPeak())


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5), st.integers(0, 5)),
                min_size=2, max_size=12))
def test_any_graph(shape):
    """Nodes of any size that each read two earlier ones: orders stay safe and get no heavier."""
    def build(x):
        made = [x]
        for size, a, b in shape:
            left, right = made[-1 - a % len(made)], made[-1 - b % len(made)]
            made.append((left.sum() + right.sum()).expand(size).clone())
        return made[-1]

    step = by_hand(build, ("x", doubles(8)))
    given_order, life, before = list(step.computing()), lifetimes(step.graph), predecessors(step)
    for move in (late, early):
        order = move(given_order, before, life)
        assert sorted(order, key=given_order.index) == given_order
        place = {n: i for i, n in enumerate(order)}
        assert all(place[earlier] < place[n] for n in order for earlier in before[n])
    best = best_order(given_order, before, life, rounds=4)
    assert weight(best, life) <= weight(given_order, life)
    peak = timeline(step).peak_bytes
    ScheduleForPeak().run(step)
    step.verify()
    assert timeline(step).peak_bytes <= peak
