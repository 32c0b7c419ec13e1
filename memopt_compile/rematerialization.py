"""What recomputation could do to a step, as plain values: `Problem`, and its exact outcome for a
choice, `simulate`.

An operation of the forward phase can run once more in a backward phase, right before the first
operator there that needs one of its results; what that needs in turn is kept, or runs again with
it. So a value that backward reads is either *kept* from its last reader in forward to its first in
backward, the gap, or its operation runs *again*. Positions count the operators of the schedule.
Views are no values: they live with the storage that they show, and are taken again with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .liveness import Lifetimes, Workspace, lifetimes, live_bytes, no_workspace
from .ordering import is_collective, is_random
from .recomputing import overwritten_early
from .step_graph import (
    WAIT,
    Phase,
    StepGraph,
    mutated_args,
    storage_roots,
)

NEVER = 10**9  # a position behind every other


@dataclass
class Value:
    """A storage that forward makes: `made` by an operation at a position, `last` touched in forward
    there, read in backward from `first` to `final` (`first` is `NEVER` if it is not)."""

    node: fx.Node
    nbytes: int
    operation: int
    made: int
    last: int
    first: int = NEVER
    final: int = -1

    @property
    def needed(self) -> bool:
        return self.final >= 0


@dataclass
class Operation:
    """An operator of forward: the values it `reads` and `makes`, whether it may run `again`."""

    node: fx.Node
    position: int
    reads: tuple[int, ...]
    makes: list[int] = field(default_factory=list)
    again: bool = True
    seconds: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A step in its present order, with everything that a choice of recomputation depends on."""

    order: list[fx.Node]
    live: list[int]  # transient bytes at each position, as the step is
    values: list[Value]
    operations: list[Operation]
    life: Lifetimes
    backward: list[bool]
    roots: dict[fx.Node, frozenset[fx.Node]]
    workspace: Workspace

    def cost(self, again: Collection[int]) -> float:
        """Seconds that running these operations again takes."""
        return sum(self.operations[o].seconds for o in again)


def problem(step: StepGraph, seconds: Callable[[fx.Node], float],
            workspace: Workspace | None = None) -> Problem:
    """The values and operations of `step` that recomputation can choose from."""
    workspace = workspace or no_workspace
    order, life = list(step.computing()), lifetimes(step.graph)
    roots = storage_roots(step.graph)
    backward = [step.phase(n) is Phase.BACKWARD for n in order]
    fixed = overwritten_early(step)
    values: list[Value] = []
    operations: list[Operation] = []
    number: dict[fx.Node, int] = {}  # of the value that a storage is
    made_by: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        if step.phase(node) is Phase.FORWARD and node in life.size:
            maker = node.args[0] if node.target is operator.getitem else node
            if maker not in made_by:
                made_by[maker] = len(operations)
                operations.append(_operation(maker, at, roots, number, fixed, seconds))
            number[node] = len(values)
            operations[made_by[maker]].makes.append(len(values))
            values.append(Value(node, life.size[node], made_by[maker], at, at))
        for root in life.touched[node]:
            if root not in number:
                continue
            value = values[number[root]]
            if step.phase(node) is Phase.BACKWARD:
                value.first, value.final = min(value.first, at), at
            elif value.needed:  # read behind backward, though not by it: it stays as it is
                operations[value.operation].again = False
            else:
                value.last = max(value.last, at)
    written = {r: at for at, n in reversed(list(enumerate(order)))
               for a in mutated_args(n) for r in roots[a]}
    for value in values:
        if value.node in life.kept:
            operations[value.operation].again = False
    for operation, latest in zip(operations, latest_runs(values, operations)):
        reads = {r for a in operation.node.all_input_nodes for r in roots[a]}
        if latest >= min((written.get(r, NEVER) for r in reads), default=NEVER):
            operation.again = False  # an operand may be overwritten by then
    return Problem(order, live_bytes(order, life, workspace), values, operations, life, backward,
                   roots, workspace)


def _operation(node: fx.Node, at: int, roots: Any, number: dict[fx.Node, int],
               fixed: set[fx.Node], seconds: Callable[[fx.Node], float]) -> Operation:
    owners = dict.fromkeys(r for a in node.all_input_nodes for r in roots[a])
    again = not (is_random(node) or is_collective(node) or node.is_impure() or mutated_args(node)
                 or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE  # the user says so
                 or str(node.target) in (WAIT, "aten._local_scalar_dense.default")
                 or owners.keys() & fixed or roots[node] & fixed)
    return Operation(node, at, tuple(number[r] for r in owners if r in number),
                     again=again, seconds=seconds(node))


def latest_runs(values: list[Value], operations: list[Operation]) -> list[int]:
    """For each operation, the last position before which it can have to run again; -1 for never."""
    readers: list[list[int]] = [[] for _ in values]
    for o, operation in enumerate(operations):
        for v in operation.reads:
            readers[v].append(o)
    latest = [-1] * len(operations)
    for o in range(len(operations) - 1, -1, -1):
        first = min((values[v].first for v in operations[o].makes), default=NEVER)
        latest[o] = first if first < NEVER else max(  # else for the sake of others only
            (latest[x] for v in operations[o].makes for x in readers[v]), default=-1)
    return latest


@dataclass(frozen=True)
class Outcome:
    """Live bytes of the schedule that a choice gives; `at` has the position in the old order of
    each of its points: a copy's is that of the reader that it stands before."""

    live: list[int]
    at: list[int]

    @property
    def peak_bytes(self) -> int:
        return max(self.live, default=0)


def simulate(problem: Problem, again: Collection[int]) -> Outcome:
    """The live bytes, exactly, if the operations `again` run again where they are first needed."""
    values, operations, life = problem.values, problem.operations, problem.life
    number = {v.node: i for i, v in enumerate(values)}
    again, done = set(again), set()
    order: list[Any] = []
    at: list[int] = []
    touched: dict[Any, frozenset] = {}
    born, size = dict(life.born), dict(life.size)

    def owner(value: int) -> Any:
        return (value,) if values[value].operation in again else values[value].node

    def run_again(o: int, position: int) -> None:
        stack = [o]
        while stack:
            top = operations[stack[-1]]
            missing = [values[v].operation for v in top.reads
                       if values[v].operation in again - done]
            if missing:
                stack += reversed(missing)
                continue
            o = stack.pop()
            if o in done:
                continue
            done.add(o)
            key = ("again", o)
            touched[key] = frozenset(map(owner, (*top.reads, *top.makes)))
            born[key] = sum(values[v].nbytes for v in top.makes)
            size.update({(v,): values[v].nbytes for v in top.makes})
            order.append(key)
            at.append(position)

    for position, node in enumerate(problem.order):
        touches = life.touched[node]
        if problem.backward[position]:
            mine = [values[number[r]].operation for a in node.all_input_nodes
                    for r in problem.roots[a] if r in number]
            for o in mine:
                if o in again:
                    run_again(o, position)
            if mine:
                touches = frozenset(owner(number[r]) if r in number else r for r in touches)
        touched[node] = touches
        order.append(node)
        at.append(position)

    def held(key: Any) -> int:
        return problem.workspace(operations[key[1]].node if isinstance(key, tuple) else key)

    return Outcome(live_bytes(order, Lifetimes(size, touched, life.kept, born), held), at)
