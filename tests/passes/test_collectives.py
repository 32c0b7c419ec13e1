"""Collectives in a step: all ranks call them in one order, and nobody reads a result too early."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from graphs import by_hand, gradient, seed

from memopt_compile import costs, programs
from memopt_compile.errors import OptionError
from memopt_compile.lowering.pieces import cut_points
from memopt_compile.memory_plan import MemoryPlan
from memopt_compile.options import Options
from memopt_compile.ordering import is_collective, predecessors
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.check_finite import CheckFinite
from memopt_compile.passes.compress import Compress
from memopt_compile.passes.rematerialize_free import fuses
from memopt_compile.records import Compilation
from memopt_compile.step_graph import WAIT, storage_roots

OPS = torch.ops._c10d_functional


def summed(x):
    return OPS.wait_tensor(OPS.all_reduce(x, "sum", "group"))


def two_sums(p, q):
    a = torch.ops.aten.detach.default(summed(p * 2))
    p.copy_(a + 1)
    for _ in range(40):
        a = (a * a).sin()
    q.copy_(summed(q * 2) + a)


@pytest.fixture
def step():
    found = by_hand(two_sums, ("p", torch.rand(4)), ("s", torch.rand(4)))
    Canonicalize().run(found)
    found.verify()
    return found


def calls(step):
    return [n for n in step.computing() if is_collective(n)]


def test_keep_their_order(step):
    first, second = calls(step)
    assert first in predecessors(step)[second]


def test_are_waited_for(step):
    """The wait is a view of the result that may not be left out, nor made again."""
    waits = [n for n in step.computing() if n.target is WAIT]
    roots = storage_roots(step.graph)
    assert [roots[w] for w in waits] == [{c} for c in calls(step)]
    assert all(list(c.users) == [w] and not fuses(w) for c, w in zip(calls(step), waits))


def test_are_not_run_to_see_what_they_cost(step):
    """A run while the step is compiled would be taken by other ranks for one of their step."""
    with mock.patch.object(costs, "_measure", return_value=1):
        held = costs.workspace(step)
        assert [held(n) for n in calls(step)] == [0, 0]


def test_are_in_one_piece(step):
    nodes = [n for n in step.computing() if n.target is not WAIT]
    points = cut_points(nodes)
    first, second = (nodes.index(n) for n in calls(step))
    assert not [p for p in points if first < p <= second + 1]


def test_a_step_with_them_is_not_taken_back():
    """One rank would begin anew by itself."""
    def layer(p, x):
        hidden = torch.mm(x, p)
        tanh = torch.tanh(hidden)
        upstream = torch.ops.aten.expand(seed(tanh.sum()), (8, 4))
        return gradient(summed(torch.mm(x.t(), upstream * tanh)))

    found = by_hand(layer, ("p", torch.rand(4, 4).double()), ("x", torch.rand(8, 4).double()))
    found.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(), (("tanh", "int8"),))
    Compress().run(found)
    assert "collectives" in CheckFinite().requires(found)


def test_a_step_with_them_does_not_adapt(step):
    """Ranks see different activations."""
    record = Compilation("step", Options(adapt=True, compress="int4", memory_budget=0.5), "eager")
    with pytest.raises(OptionError, match="ranks see different activations"):
        programs.fitted(step, record)
