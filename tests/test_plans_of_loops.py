"""What Inductor makes one loop of, in plans: one operation, that runs again as one."""

import functools
import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import outcome, training_step, values_for  # noqa: E402

from memopt_compile.backends import eager  # noqa: E402
from memopt_compile.costs import workspace  # noqa: E402
from memopt_compile.liveness import timeline  # noqa: E402
from memopt_compile.passes.canonicalize import Canonicalize  # noqa: E402
from memopt_compile.passes.plan_memory import memory_plan  # noqa: E402
from memopt_compile.passes.recompute import Recompute  # noqa: E402
from memopt_compile.passes.release_gradients import ReleaseGradients  # noqa: E402
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak  # noqa: E402
from memopt_compile.planning import planner  # noqa: E402
from memopt_compile.planning.rematerialization import problem, simulate  # noqa: E402
from memopt_compile.seconds import roofline  # noqa: E402


class Chain(nn.Module):
    """Sums and multiples that backward does not read: Inductor makes none of them, and two products lie between."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh((x * 0.5 + self.first(x) * 2) * 0.5 + (self.second(x) * 0.1).sin() * 3)


@functools.cache
def chains():
    torch.manual_seed(0)
    step = training_step(nn.Sequential(*(Chain() for _ in range(3)), nn.Linear(32, 4)).double(), torch.optim.SGD, batch=64)
    for each in (Canonicalize(), ReleaseGradients(), ScheduleForPeak()):
        each.run(step)
    return step


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_one_loop_runs_again_as_one(data):
    """Inductor's schedule of the rewritten graph has at most the bytes that were simulated for the plan, and the same numbers."""
    step = chains()
    found = problem(step, roofline("cpu"), workspace(step, "inductor"))
    again = data.draw(st.sets(st.sampled_from([o for o, each in enumerate(found.operations) if each.again]), min_size=1))
    twin = step.copy()
    twin.plan = memory_plan(found, 0, planner.Solution(frozenset(again), 0, 0.0, 0.0))
    Recompute().run(twin, held := workspace(twin, "inductor"))
    twin.verify()
    assert timeline(twin, held).transient_peak_bytes <= simulate(found, again).peak_bytes
    assert all(map(torch.equal, outcome(eager.lower(twin), values_for(twin)), outcome(eager.lower(step), values_for(step))))


def test_a_loop_is_one_operation_and_takes_less_than_its_parts():
    step = chains()
    apart, together = (problem(step, roofline("cpu"), held) for held in (None, workspace(step, "inductor")))
    inside = [o for o in together.operations if o.inside]
    assert len(apart.operations) == len(together.operations) + sum(len(o.inside) for o in inside) and len(inside) == 3 * 2
    seconds = {o.node: o.seconds for o in apart.operations}
    assert all(o.seconds < sum(seconds[n] for n in (*o.inside, o.node)) for o in inside)
    assert sum(together.live) < sum(apart.live)
