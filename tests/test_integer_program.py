"""The integer program: equal values share variables, rows say what simulation says, and what is known is not searched again."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import training_step  # noqa: E402
from stacks import MODELS, prepared, stack  # noqa: E402

from memopt_compile.passes.canonicalize import Canonicalize  # noqa: E402
from memopt_compile.passes.release_gradients import ReleaseGradients  # noqa: E402
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak  # noqa: E402
from memopt_compile.planning import planner  # noqa: E402
from memopt_compile.planning.integer_program import NODES, Moment, Program  # noqa: E402
from memopt_compile.planning.positions import _point, positions  # noqa: E402
from memopt_compile.planning.rematerialization import Means, problem, simulate  # noqa: E402
from memopt_compile.reporting import explaining  # noqa: E402
from memopt_compile.seconds import roofline  # noqa: E402
from memopt_compile.structure import groups  # noqa: E402


class Apart(Program):
    """With a variable of its own for each value and each position of each chain."""

    def _least(self, rows):
        rows = dict.fromkeys(rows)
        if not rows:
            return None
        own = self._column(object())
        for low, terms in rows:
            self.rows.add(low, ((1, own), *terms))
        return own


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compress", [None, "auto"])
def test_equal_values_share_variables_and_nothing_is_lost(name, compress):
    """A program that is not strict allows more than can be done: what runs again in some layers is kept in others."""
    found = problem(prepared(name), roofline("cpu"), means=Means(compress=compress))
    apart, shared, loose = Apart(found, groups(found), strict=True), *(
        Program(found, groups(found), strict=strict) for strict in (True, False))
    slack = dict.fromkeys(positions(found), 0)
    least = [program.solve(slack, None, 0.0)[3] for program in (apart, shared, loose)]
    assert least[1] == pytest.approx(least[0], rel=1e-4) and least[2] <= least[1] * (1 + 1e-4)
    for share in (0.3, 0.7):
        limit = int(least[0] + share * (max(found.live) - least[0]))
        plans = [program.solve(slack, limit, 0.0) for program in (apart, shared, loose)]
        one, other, lower = (found.cost(*plan[:2]) for plan in plans)
        gap = 1e-3 + max(plan[2] for plan in plans)  # formats of equal cost are chosen by their errors
        assert other == pytest.approx(one, rel=gap) and lower <= other * (1 + gap)
    assert len(shared.columns) < len(apart.columns)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kept", [3, 100])
def test_the_row_of_a_moment_is_what_simulation_says(name, kept):
    """In most of the places where something runs again; else it is above: an operand counts as kept as long as any reader could
    run again."""
    found = problem(prepared(name), roofline("cpu"))
    together = groups(found)
    again = frozenset(o for o, group in enumerate(together) if found.operations[o].again and (group + 1) % kept)
    outcome, above = simulate(found, again), []
    for place, live in enumerate(outcome.live):
        if isinstance(moment := _point(outcome, place), Moment):
            model = Program(found, together, strict=True)
            model.out = {r: int(o in again) for o, r in enumerate(model.run) if r is not None}
            model.out |= {c: 0 for ways in model.pack for c in ways}
            above.append(model.solve({moment: 0}, None, 0.0)[3] - live)
    assert min(above) > -8 and 2 * sum(each < 8 for each in above) > len(above) > 0  # bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compress", [None, "auto"])
def test_what_is_ruled_out_is_in_no_faster_plan(name, compress):
    found, out = problem(prepared(name), roofline("cpu"), means=Means(compress=compress)), 0
    slack = dict.fromkeys(positions(found), 0)
    for share in (0.8, 0.65, 0.5):
        model = Program(found, groups(found))
        limit = int(model.solve(slack, None, 0.0)[3] / share)
        rough, best = (model.solve(slack, limit, gap) for gap in (planner.COARSE, 0.0))
        model.rule_out(slack, limit, *rough[:2])
        assert found.cost(*model.solve(slack, limit, 0.0)[:2]) == pytest.approx(found.cost(*best[:2]), rel=1e-3)
        out += len(model.out)
    assert out


@pytest.mark.parametrize("name", MODELS)
def test_what_was_solved_is_solved_once(name):
    """A solution that satisfies less room, too, is one there; with more room, or for the peak, another may be."""
    found, again = problem(prepared(name), roofline("cpu")), 0
    model, slack = Program(found, groups(found)), dict.fromkeys(positions(found), 0)
    limit = model.solve(slack, None, 0.0)[3]
    for share, less in ((1.5, 0), (1.5, 1), (1.4, 0), (1.4, limit // 100), (1.2, 0), (1.2, limit // 50), (1.6, 0)):
        slack = dict.fromkeys(slack, less)
        before = model.work
        plan = model.solve(slack, int(share * limit), 0.0)
        again += model.work == before
        anew = Program(found, groups(found)).solve(slack, int(share * limit), 0.0)
        assert (plan is None) == (anew is None)
        assert plan is None or found.cost(*plan[:2]) == pytest.approx(found.cost(*anew[:2]), rel=1e-6)
    assert 0 < again < 7 and model.solve(slack, None, 0.0)[3] == limit


def test_rows_of_a_program_grow_with_what_is_different_in_it():
    """Of three times as many equal layers few differ."""
    def rows(times):
        model = nn.Sequential(*stack(lambda: nn.Linear(32, 32), nn.GELU, times=times), nn.Linear(32, 4)).double()
        step = training_step(model, torch.optim.SGD, batch=64)
        for each in (Canonicalize(), ReleaseGradients(), ScheduleForPeak()):
            each.run(step)
        found = problem(step, roofline("cpu"))
        return [len(kind(found, groups(found)).rows.low) for kind in (Program, Apart)]

    (few, apart), (many, more) = rows(8), rows(24)
    assert many - few <= 0.5 * (more - apart)


def test_so_are_those_with_dropout_on_inductor_whose_seeds_differ():
    model = nn.Sequential(*stack(lambda: nn.Linear(32, 32), nn.GELU, lambda: nn.Dropout(0.3), times=8), nn.Linear(32, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    record = explaining.planned(step, (torch.rand(64, 32),), {"lowering": "inductor"}, captured_only=True)
    for each in (Canonicalize(), ReleaseGradients(), ScheduleForPeak()):
        each.run(record.captured)
    found = problem(record.captured, roofline("cpu"))
    drawn = [n for o, n in zip(found.operations, groups(found)) if o.node.target is torch.ops.prims.inductor_random.default]
    assert len(drawn) == 8 and len(set(drawn)) <= 5  # halves of seven layers or eight, and what is beside them


@pytest.mark.parametrize("status, nodes", [(2, 0), (4, 3 * NODES)])  # as scipy has it: infeasible, and no solution in these nodes
def test_a_search_that_finds_nothing_has_done_the_work_of_its_nodes(status, nodes):
    found = problem(prepared("linear"), roofline("cpu"))
    model, slack = Program(found, groups(found)), dict.fromkeys(positions(found), 0)
    nothing = SimpleNamespace(status=status, x=None, mip_node_count=None)
    with mock.patch("scipy.optimize.milp", lambda *given, **more: nothing):
        assert model.solve(slack, max(found.live), 0.0, nodes=3 * NODES) is None
    assert model.work == len(model.rows.low) * (1 + nodes / NODES) and model.infeasible == (not nodes)
