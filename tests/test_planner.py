"""The planner against exhaustive search, and its simulation against the rewritten graph."""

import itertools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import outcome, training_step, values_for  # noqa: E402
from stacks import MODELS, Attention, prepared, stack  # noqa: E402

from memopt_compile.backends import eager  # noqa: E402
from memopt_compile.liveness import timeline  # noqa: E402
from memopt_compile.passes.canonicalize import Canonicalize  # noqa: E402
from memopt_compile.passes.compress import Compress  # noqa: E402
from memopt_compile.passes.plan_memory import PlanMemory, memory_plan  # noqa: E402
from memopt_compile.passes.recompute import Recompute  # noqa: E402
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak  # noqa: E402
from memopt_compile.planning import planner  # noqa: E402
from memopt_compile.planning.rematerialization import Means, problem, simulate  # noqa: E402
from memopt_compile.seconds import roofline  # noqa: E402
from memopt_compile.structure import groups, halves  # noqa: E402


def rewritten(step, again, packed=None):
    """A copy of `step` in which these operations run again and these values are packed."""
    twin = step.copy()
    found = problem(twin, roofline("cpu"), means=Means(compress="auto"))
    chosen = planner.Solution(frozenset(again), 0, 0.0, 0.0, packed or {})
    twin.plan = memory_plan(found, 0, chosen)
    Recompute().run(twin)
    Compress().run(twin)
    twin.verify()
    return twin


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_batches", [1, 2])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
@pytest.mark.table(4)
def test_simulation_is_exact(name, micro_batches, data):
    """For any choice: live bytes at every point, and the same numbers bit by bit if none is lossy."""
    step = prepared(name, micro_batches)
    found = problem(step, roofline("cpu"), means=Means(compress="auto"))
    able = [o for o, operation in enumerate(found.operations) if operation.again]
    again = data.draw(st.sets(st.sampled_from(able)))
    packable = [v for v, value in enumerate(found.values) if value.packed
                and value.needed and value.operation not in again]
    packed = {v: data.draw(st.sampled_from(found.values[v].packed))
              for v in data.draw(st.sets(st.sampled_from(packable)) if packable else st.just(()))}
    twin = rewritten(step, again, packed)
    predicted = simulate(found, again, packed).live
    real = [point.live_bytes for point in timeline(twin).points]
    assert max(real) == max(predicted)
    if any(p.lossy or not p.restores for p in packed.values()):
        return
    values = values_for(step)
    for a, b in zip(outcome(eager.lower(step), values), outcome(eager.lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_where_no_plan_is_as_fast_none_is_looked_for_any_further():
    found = problem(prepared("attention"), roofline("cpu"))
    limit, together = int(0.7 * max(found.live)), groups(found)
    plan = planner.cheapest(found, limit, together)
    with mock.patch.object(planner, "smallest", side_effect=AssertionError):
        assert planner._cheapest(planner._Search(found, limit, together, 0.9 * plan.seconds)) is None


@pytest.mark.parametrize("seconds, gap, work, least, asked, taken", [
    ({100: 1.0, 99: 0.9, 98: 0.8}, 0.015, 1, 50, [100], 1.0),  # near enough
    ({100: 1.0, 98: 0.8}, 0.2, 1, 50, [100, 99], 1.0),  # a plan for a little less is not faster
    ({100: 1.0, 99: 0.82, 98: 0.7}, 0.4, 1, 50, [100, 99, 98, 97], 0.7),
    ({100: 1.0, 99: 0.81, 98: 0.7}, 0.2, 1, 50, [100, 99], 0.81),  # 0.8 is proved
    ({100: 1.0, 99: 0.9, 98: 0.8}, 0.4, 1.5 * planner.WORK, 50, [100, 99], 0.9),
    ({100: 1.0, 99: 0.82, 98: 0.7}, 0.4, 1, 96, [100, 99], 0.82),  # 98 is near the smallest peak
    ({}, 0.2, 1, 50, [100], None),
])
def test_a_plan_far_from_what_is_proved_may_be_one_for_a_little_less(seconds, gap, work, least, asked, taken):
    limits = []

    def found(search):
        limits.append(search.limit)
        search.work = work
        plan = planner.Solution(frozenset(), search.limit, seconds.get(search.limit, 9), gap)
        return plan if plan.seconds <= search.at_most else None

    smallest = planner.Solution(frozenset(), least, 9.0, 1.0)
    with (mock.patch.object(planner, "_cheapest", found), mock.patch.object(planner, "_may_fit", return_value=False),
          mock.patch.object(planner, "smallest", return_value=smallest)):
        plan = planner._also_below(None, 100, (), 1.0)
    assert limits == asked and (plan and plan.seconds) == taken
    assert plan is None or plan.gap == pytest.approx(1 - (1 - gap) / taken)


def exhaustive(found, limit, able):
    """The least seconds of any choice that fits, trying every one."""
    fits = [found.cost(again) for size in range(len(able) + 1)
            for again in itertools.combinations(able, size)
            if simulate(found, again).peak_bytes <= limit]
    return min(fits, default=None)


@pytest.mark.parametrize("name", ["linear", "attention"])
@pytest.mark.parametrize("share", [0.95, 0.85, 0.75, 0.65])
def test_as_good_as_trying_everything(name, share):
    step = prepared(name)
    found = problem(step, roofline("cpu"))
    able = sorted((o for o, operation in enumerate(found.operations) if operation.again),
                  key=lambda o: -sum(found.values[v].nbytes for v in found.operations[o].makes))[:9]
    for o, operation in enumerate(found.operations):
        operation.again = o in able
    limit = int(share * max(found.live))
    best = exhaustive(found, limit, able)
    got = planner.cheapest(found, limit, range(len(found.operations)))
    if got is None:
        assert best is None
    else:
        assert got.peak_bytes <= limit == limit and got.peak_bytes == simulate(found, got.again).peak_bytes
        assert got.seconds == pytest.approx(found.cost(got.again))
        assert got.seconds <= best * (1 + planner.GAP) + 1e-12


def test_smaller_limits_cost_more():
    found = problem(prepared("linear"), roofline("cpu"))
    alone, peak = range(len(found.operations)), max(found.live)
    plans = [planner.cheapest(found, int(share * peak), alone) for share in (1, 0.9, 0.8, 0.7)]
    plans = [plan for plan in plans if plan]
    assert len(plans) >= 3
    for larger, smaller in itertools.pairwise(plans):
        assert smaller.seconds >= larger.seconds * (1 - planner.GAP)
        assert smaller.peak_bytes <= larger.peak_bytes


def test_the_smallest_is_below_what_cannot_be_met():
    found = problem(prepared("linear"), roofline("cpu"))
    alone = range(len(found.operations))
    least = planner.smallest(found, alone)
    assert least.peak_bytes == simulate(found, least.again).peak_bytes < max(found.live)
    assert planner.cheapest(found, least.peak_bytes, alone) is not None
    assert planner.cheapest(found, int(0.9 * least.peak_bytes), alone) is None


def test_the_smallest_is_looked_for_once_however_many_limits_are_asked_for_in_between():
    found = problem(prepared("linear"), roofline("cpu"))
    alone = range(len(found.operations))
    with (mock.patch.dict(planner._found, clear=True),
          mock.patch.object(planner, "_smallest", wraps=planner._smallest) as looked):
        for i in range(3 * planner.REMEMBERED):
            if i % 60 == 0:
                planner.smallest(found, alone)
            planner._known(("limit", i), found, alone, lambda: None)
        assert looked.call_count == 1 and len(planner._found) == planner.REMEMBERED


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["linear", "attention"])
def test_the_smallest_is_near_that_of_all_choices(name, large, monkeypatch):
    """Although its search ends after some nodes, and knows of bursts only by holding what it knows to less."""
    monkeypatch.setattr(planner, "LARGE", 0 if large else planner.LARGE)
    found = problem(prepared(name), roofline("cpu"))
    able = sorted((o for o, operation in enumerate(found.operations) if operation.again),
                  key=lambda o: -sum(found.values[v].nbytes for v in found.operations[o].makes))[:9]
    for o, operation in enumerate(found.operations):
        operation.again = o in able
    best = min(simulate(found, again).peak_bytes for size in range(len(able) + 1)
               for again in itertools.combinations(able, size))
    least = planner._smallest(found, range(len(found.operations)))
    assert best <= least.peak_bytes <= best / (1 - planner.RESOLUTION)


@pytest.mark.parametrize("name", ["dropout", "normed"])
def test_the_smallest_of_a_large_program_is_found_by_small_ones(name, monkeypatch):
    """All but the first hold decisions, and come to what programs of all decisions do."""
    together = groups(found := problem(prepared(name, 2), roofline("cpu")))
    whole = planner._smallest(found, together)
    monkeypatch.setattr(planner, "LARGE", 0)
    held, solve = [], planner.Program.solve

    def solved(model, *args, **more):
        held.append(len(model.out))
        return solve(model, *args, **more)

    monkeypatch.setattr(planner.Program, "solve", solved)
    least = planner._smallest(found, together)
    assert held[0] == 0 and len(held) > 1 and all(held[1:])
    assert least.peak_bytes == simulate(found, least.again).peak_bytes <= whole.peak_bytes * (1 + planner.RESOLUTION)


def test_no_plan_is_looked_for_twice_unless_the_step_has_changed():
    step, device = prepared("linear").copy(), torch.device("cpu")
    with mock.patch.object(planner, "cheapest", wraps=planner.cheapest) as looked:
        for _ in range(2):
            PlanMemory(1, device, or_smallest=False).run(step)
        assert looked.call_count == 1 and step.plan is None
        step.replace(*[n for n in step.computing() if n.target is torch.ops.aten.gelu.default][1::-1])
        PlanMemory(1, device).run(step)
        assert looked.call_count == 2 and not step.plan.fits


def numbers(found):
    return [o for o, each in enumerate(found.operations) if all(found.values[v].nbytes <= 8 for v in each.makes)]


def test_equal_layers_are_decided_together():
    found = problem(prepared("linear"), roofline("cpu"))
    number = groups(found)
    layers = [number[o] for o, operation in enumerate(found.operations)
              if operation.node.target is torch.ops.aten.gelu.default]
    assert layers[0] == layers[1] != layers[2] != layers[3]
    several = problem(prepared("linear", micro_batches=4), roofline("cpu"))
    number, alone = groups(several), numbers(several)
    size = len(number) // 4
    first, second, third = ([number[i * size + o] for o in range(size) if i * size + o not in alone] for i in range(3))
    assert first == [n - size for n in second] and second == third  # beside the first there are no gradients yet
    assert len(alone) == 4 and all(number[o] == o for o in alone)  # the losses
    assert not several.operations[-1].again  # the loss that the step returns


def test_a_lossy_query_takes_its_attention_along():
    """With a query that is not exact the normalizer of forward would be another attention's."""
    torch.manual_seed(0)

    class Fused(Attention):
        def forward(self, x):
            q, k, v = (part.view(1, 1, -1, 32) for part in self.qkv(self.norm(x)).chunk(3, -1))
            return x + torch.nn.functional.scaled_dot_product_attention(q, k, v).view(-1, 32)

    model = nn.Sequential(*stack(Fused, nn.GELU, times=4), nn.Linear(32, 4))
    step = training_step(model.double(), torch.optim.SGD, batch=512)
    for each in (Canonicalize(), ScheduleForPeak()):
        each.run(step)
    found = problem(step, roofline("cpu"), means=Means(compress="int4"))
    queries, attentions = zip(*found.together)
    for v, value in enumerate(found.values):  # nothing else can be done
        value.packed = value.packed if v in queries else ()
    for o, operation in enumerate(found.operations):
        operation.again = operation.again and o in attentions
    plan = planner.smallest(found, groups(found))
    packed = set(plan.packed)
    assert packed and all(o in plan.again for v, o in found.together if v in packed)
    # Nor is anything that has to be exact made of what is not.
    for operation in found.operations:
        operation.exact = operation.reads
    assert not planner.smallest(found, groups(found)).packed


def test_running_statistics_hold_nothing_back():
    """Their update reads a batch normalization's small results, long before backward does."""
    found = problem(prepared("normed", micro_batches=2), roofline("cpu"))
    again = {o for o, operation in enumerate(found.operations)
             if operation.again and operation.node.target is torch.ops.aten.addmm.default}
    both = planner.cheapest(found, simulate(found, again).peak_bytes, range(len(found.operations)))
    assert both is not None and both.seconds <= found.cost(again)


@given(st.integers(0, 200))
def test_halves_reach_every_count(count):
    first = halves(count)
    sizes = [first.count(start) for start in sorted(set(first))]
    assert len(first) == count and first == sorted(first)
    sums = {0}
    for size in sizes:
        sums |= {size + known for known in sums}
    assert sums == set(range(count + 1))
