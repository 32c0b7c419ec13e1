"""Plans near the smallest peak, changed to faster ones."""

import math
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from test_mending import asked, groups  # noqa: E402
from test_planner import prepared, problem, roofline  # noqa: E402

from memopt_compile.planning import planner  # noqa: E402
from memopt_compile.planning.integer_program import Program  # noqa: E402
from memopt_compile.planning.neighbours import improved  # noqa: E402
from memopt_compile.planning.rematerialization import simulate  # noqa: E402


def recurrence():
    found = asked()
    return found, groups(found)


def attention():
    found = problem(prepared("attention"), roofline("cpu"))
    return found, groups(found)


def is_plan(found, together, limit, again, packed):
    """It fits, of equal layers all or none run again, and nothing does that may not."""
    assert simulate(found, again, packed).peak_bytes <= limit
    assert all(found.operations[o].again for o in again)
    tied = {together[o] for o in again}
    return all(o in again for o, operation in enumerate(found.operations) if operation.again and together[o] in tied)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([recurrence, attention]), st.floats(1.0, 1.25))
def test_a_faster_plan_that_fits(step, factor):
    found, together = step()
    least = planner.smallest(found, together)
    limit = int(factor * least.peak_bytes)
    again, packed = improved(found, together, limit, least.again, least.packed)
    assert is_plan(found, together, limit, again, packed)
    assert found.cost(again, packed) <= least.seconds


@pytest.mark.parametrize("step", [recurrence, attention])
def test_most_is_gained_without_the_whole_program(step):
    """Of what separates the plan with the smallest peak from the fastest that is found with it."""
    found, together = step()
    least = planner.smallest(found, together)
    limit = int(1.1 * least.peak_bytes)
    fastest = planner._cheapest(planner._Search(found, limit, together, math.inf)).seconds
    assert fastest < 0.97 * least.seconds
    with mock.patch.object(Program, "solve", autospec=True, side_effect=Program.solve) as solved:
        seconds = found.cost(*improved(found, together, limit, least.again, least.packed))
    assert seconds - fastest < 0.2 * (least.seconds - fastest)
    assert solved.call_count and solved.call_args.args[0].out  # most is held to what the plan has


def test_the_fastest_plan_stays():
    found, together = attention()
    limit = int(0.8 * max(found.live))
    plan = planner.cheapest(found, limit, together)
    assert plan.gap < 0.004
    assert improved(found, together, limit, plan.again, plan.packed) == (plan.again, plan.packed)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.02])
def test_a_search_near_the_smallest_peak_has_no_program_of_all_decisions_but_the_first(factor):
    found, together = recurrence()
    least = planner.smallest(found, together)
    search = planner._Search(found, int(factor * least.peak_bytes), together, math.inf)
    with (mock.patch.object(planner, "NEAR", 10),  # in a recurrence the relaxed program says little
          mock.patch.object(planner._Search, "ladder", side_effect=AssertionError),
          mock.patch.object(planner._Search, "nearest", autospec=True, side_effect=planner._Search.nearest) as nearest):
        plan = planner._cheapest(search)
    assert nearest.call_count == 1 and plan.peak_bytes <= search.limit and plan.seconds <= least.seconds
