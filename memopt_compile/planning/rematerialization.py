"""What recomputation and compression could do to a step, as plain values: `Problem`, and its exact
outcome for a choice, `simulate`.

An operation of the forward phase can run once more in a backward phase, right before the first
operator there that needs one of its results; what that needs in turn is kept, or runs again with
it. So a value that backward reads is *kept* from its last reader in forward to its first in
backward, the gap; or its operation runs *again*; or it is *packed* (or sent to the host) right behind its last reader in
forward, and unpacked (or fetched) right before the first operator of backward that needs it. Positions count the
operators of the schedule. Views are no values: they live with the storage that they show, and are
taken again with it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from ..liveness import Lifetimes, Workspace, lifetimes, live_bytes, no_workspace, seen_by
from ..partition import RANKS, RANKS_HOST
from ..seconds import in_one_loop
from ..step_graph import Phase, StepGraph, storage_roots
from ..transfers import HOST
from .packing import Packed, candidates, in_host_memory, in_parts
from .recomputing import Writes, kept_by_the_user, loops, may_run_again, operands_of
from .replicated import alike
from .sensitivity import Use, may_follow, sensitivity

NEVER = 10**9  # a position behind every other
PUT_AWAY = {RANKS: "partition", RANKS_HOST: "partition", HOST: "offload"}  # forms of passes behind `compress`
NOTHING: Mapping[int, Packed] = MappingProxyType({})


@dataclass(frozen=True)
class Means:
    """What the user allows: that operators run `again`; that values wait in `host` memory; that the
    ranks that have a value alike keep it in `parts`; the lossy
    formats of this `compress` option, up to `max_error` in each. Formats that lose nothing always are. `instead` has pairs of an activation's
    name and the format that takes the place of "int4 outliers" for it (`adaptation`)."""

    again: bool = True
    compress: str | None = None
    max_error: float | None = None
    instead: tuple[tuple[str, str], ...] = ()
    host: bool = False
    parts: bool = False


ALL_EXACT = Means()


@dataclass
class Value:
    """A storage that forward makes: `made` by an operation at a position, `last` touched in forward
    there, read in backward from `first` to `final` (`first` is `NEVER` if it is not). `packed` are
    the ways to keep it in fewer bytes; `exact` says that backward needs what forward made."""

    node: fx.Node
    nbytes: int
    operation: int
    made: int
    last: int
    first: int = NEVER
    final: int = -1
    packed: tuple[Packed, ...] = ()
    exact: bool = False

    @property
    def needed(self) -> bool:
        return self.final >= 0


@dataclass
class Operation:
    """An operator of forward, with what is `inside` its loop: the values it `reads` and `makes`, whether it may run `again`,
    and those of the values that have to be `exact` if it does."""

    node: fx.Node
    position: int
    reads: tuple[int, ...]
    makes: list[int] = field(default_factory=list)
    again: bool = True
    seconds: float = 0.0
    exact: tuple[int, ...] = ()
    inside: tuple[fx.Node, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in (*self.inside, self.node))


@dataclass(frozen=True)
class Problem:
    """A step in its present order, with everything that a choice depends on. If the value of a pair
    in `together` does not come back exactly, the operation of the pair has to run again."""

    order: list[fx.Node]
    live: list[int]  # transient bytes at each position, as the step is
    values: list[Value]
    operations: list[Operation]
    life: Lifetimes
    backward: list[bool]
    roots: dict[fx.Node, frozenset[fx.Node]]
    workspace: Workspace
    over: Mapping[fx.Node, int] = field(default_factory=dict)  # bytes of operands that an operator of the step writes over
    together: tuple[tuple[int, int], ...] = ()

    def cost(self, again: Collection[int], packed: Mapping[int, Packed] = NOTHING) -> float:
        """Seconds that running these operations again and packing these values takes."""
        return (sum(self.operations[o].seconds for o in again)
                + sum(each.seconds for each in packed.values()))


def problem(step: StepGraph, seconds: Callable[[fx.Node], float],
            workspace: Workspace | None = None, means: Means = ALL_EXACT) -> Problem:
    """The values and operations of `step` that can be chosen from with these `means`."""
    life, over = seen_by(workspace or no_workspace, step)
    alone = lifetimes(step.graph)  # each operator for itself
    workspace = functools.cache(workspace or no_workspace)  # each choice asks for all of it again
    tolerated = sensitivity(step, means.compress)
    packed = candidates(tolerated, seconds, means.max_error, dict(means.instead))
    order, roots = list(step.computing()), storage_roots(step.graph)
    backward = [step.phase(n) is Phase.BACKWARD for n in order]
    writes = Writes(step)
    common = alike(step) if means.parts else set()

    def put_away(node: fx.Node) -> tuple[Packed, ...]:
        return (in_host_memory(node, seconds) if means.host else ()) + (
            in_parts(node, seconds, step.parallel, means.host) if node in common else ())

    insides = loops(step, life)
    never = {node for inside in insides.values() for node in inside}
    # What fuses into several loops may be kept for a copy of one.
    made = {node: alone.size[node] for node in order if step.phase(node) is Phase.FORWARD and node in life.size and node not in never}
    life = replace(life, size=life.size | made, born=life.born | {node: alone.born[node] for node in made})
    values: list[Value] = []
    operations: list[Operation] = []
    number: dict[fx.Node, int] = {}  # of the value that a storage is
    made_by: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        if step.phase(node) is Phase.FORWARD and node in life.size and node not in never:
            maker = node.args[0] if node.target is operator.getitem else node
            if maker not in made_by:
                made_by[maker] = len(operations)
                operations.append(_operation(maker, insides.get(maker, []), at, roots, number, writes.early, seconds))
            number[node] = len(values)
            operations[made_by[maker]].makes.append(len(values))
            values.append(Value(node, life.size[node], made_by[maker], at, at,
                                packed=_allowed(node, packed, writes.early, put_away),
                                exact=tolerated.use.get(node) is Use.EXACT))
        for root in life.touched[node]:
            if root not in number:
                continue
            value = values[number[root]]
            if step.phase(node) is Phase.BACKWARD or value.needed and root not in alone.touched[node]:  # in one loop with such
                value.first, value.final = min(value.first, at), at
            elif value.needed:  # read behind backward, though not by it: it stays as it is
                operations[value.operation].again, value.packed = False, ()
            else:
                value.last = max(value.last, at)
    position = {node: at for at, node in enumerate(order)}
    for value in values:
        if value.node in life.kept:
            operations[value.operation].again, value.packed = False, ()
    for operation, latest in zip(operations, latest_runs(values, operations)):
        reads = {r for a in operands_of(operation.node, operation.inside) for r in roots[a]}
        if writes.between(reads, min(position[n] for n in (*operation.inside, operation.node)), latest):
            operation.again = False  # an operand may be overwritten by then
    for operation in operations:
        operation.again = operation.again and means.again
    together = tuple((number[node], made_by[other.args[0]]) for node, others in
                     tolerated.together.items() for other in others
                     if node in number and other in number)
    live = live_bytes(order, life, lambda node: workspace(node) - over.get(node, 0))
    return Problem(order, live, values, operations, life, backward, roots, workspace, over, together)


def _allowed(node: fx.Node, packed: Mapping[fx.Node, tuple[Packed, ...]],
             fixed: set[fx.Node], put_away: Callable[[fx.Node], tuple[Packed, ...]]) -> tuple[Packed, ...]:
    if kept_by_the_user(node) or node in fixed:
        return ()
    return packed.get(node, ()) + put_away(node)


def _operation(node: fx.Node, inside: list[fx.Node], at: int, roots: Any, number: dict[fx.Node, int],
               fixed: set[fx.Node], seconds: Callable[[fx.Node], float]) -> Operation:
    loop = (*inside, node)
    owners = dict.fromkeys(r for a in operands_of(node, inside) for r in roots[a])
    again = may_run_again(node) and not roots[node] & fixed
    follows = all(may_follow(each, a) for each in loop for a in each.all_input_nodes if a in inside)
    exact = dict.fromkeys(r for each in loop for a in each.all_input_nodes
                          if a not in inside and not (follows and may_follow(each, a)) for r in roots[a])
    return Operation(node, at, tuple(number[r] for r in owners if r in number), again=again,
                     seconds=in_one_loop(seconds, loop, node.meta["val"].device) if inside else seconds(node),
                     exact=tuple(number[r] for r in exact if r in number), inside=tuple(inside))


def fingerprint(problem: Problem) -> tuple:
    """Equal for problems whose every choice has the same outcome, such as those of copies of a step."""
    def names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(sorted(node.name for node in nodes))

    return (
        tuple((n.name, str(n.target), back, live, problem.workspace(n), names(problem.life.touched[n]))
              for n, back, live in zip(problem.order, problem.backward, problem.live)),
        tuple((v.node.name, v.nbytes, v.operation, v.made, v.last, v.first, v.final, v.exact,
               tuple((p.form, p.nbytes, p.seconds, p.error, p.restores) for p in v.packed)) for v in problem.values),
        tuple((o.names, o.position, o.reads, tuple(o.makes), o.again, o.seconds, o.exact) for o in problem.operations),
        names(problem.life.kept), problem.together)


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


def deaths(problem: Problem) -> dict[fx.Node, int]:
    """The last position at which each storage is alive; the number of positions for what stays."""
    life = problem.life
    death = dict.fromkeys(life.kept, len(problem.order))
    for position, node in enumerate(problem.order):
        death.update((root, position) for root in life.touched[node] if root not in life.kept)
    return death


def carried(problem: Problem) -> list[int]:
    """The bytes that are alive right before each position, and behind the last."""
    change = [0] * (len(problem.order) + 1)
    for position, node in enumerate(problem.order):
        change[position + 1] += problem.life.born.get(node, 0)
    for root, position in deaths(problem).items():
        if position < len(problem.order):
            change[position + 1] -= problem.life.size.get(root, 0)
    return list(itertools.accumulate(change))


@dataclass(frozen=True)
class Outcome:
    """Live bytes of the schedule that a choice gives; `at` has the position in the old order of
    each of its points: a copy's is that of the reader that it stands before. `life` is of what runs, in `order`:
    a node as itself, else a tuple. A storage is its node, (v,) where value v is there again, or ("packed", v)."""

    live: list[int]
    at: list[int]
    order: list[Any]
    life: Lifetimes

    @property
    def peak_bytes(self) -> int:
        return max(self.live, default=0)

    def alive(self, index: int) -> set[Any]:
        """The storages that are alive at a point."""
        before = {root for key in self.order[:index + 1] for root in self.life.touched[key]}
        behind = {root for key in self.order[index:] for root in self.life.touched[key]}
        return before & (behind | self.life.kept)


def chain(problem: Problem, needed: int, again: Collection[int], done: set[int]) -> Iterator[int]:
    """The operations of `again` that run before `needed` can, and it, in order, but for those that made what is `done`;
    what each makes is done when it comes."""
    values, operations, stack = problem.values, problem.operations, [needed]
    while stack:
        top = operations[stack[-1]]
        missing = [values[v].operation for v in top.reads if v not in done and values[v].operation in again]
        if missing:
            stack += reversed(missing)
            continue
        o = stack.pop()
        if top.makes[0] not in done:
            done.update(top.makes)
            yield o


def simulate(problem: Problem, again: Collection[int],
             packed: Mapping[int, Packed] = NOTHING) -> Outcome:
    """The live bytes, exactly, if the operations `again` run again where they are first needed, and
    the values `packed` are packed as said."""
    values, operations, life = problem.values, problem.operations, problem.life
    number = {v.node: i for i, v in enumerate(values)}
    again, done = set(again), set()
    order: list[Any] = []
    at: list[int] = []
    touched: dict[Any, frozenset] = {}
    born, size = dict(life.born), dict(life.size)
    held: dict[Any, fx.Node] = {}  # what runs: as itself, again, or to pack
    packing: dict[int, list[int]] = {}  # values by the position behind which they are packed
    for v in sorted(packed, key=lambda v: (packed[v].form == HOST, packed[v].form in PUT_AWAY, v)):  # as the passes come
        packing.setdefault(values[v].last, []).append(v)

    def owner(value: int) -> Any:
        changed = values[value].operation in again or value in packed
        return (value,) if changed else values[value].node

    def run(key: Any, node: fx.Node, position: int, touches: Iterable[Any], makes: int) -> None:
        order.append(key)
        at.append(position)
        held[key], touched[key], born[key] = node, frozenset(touches), makes

    def unpack(among: Iterable[int], position: int) -> None:
        for v in among:
            if v in packed and v not in done:
                done.add(v)
                size[v,] = values[v].nbytes
                run(("unpack", v), packed[v].decode, position, [("packed", v), (v,)], values[v].nbytes)

    def run_again(needed: int, position: int) -> None:
        for o in chain(problem, needed, again, done):
            top = operations[o]
            size.update({(v,): values[v].nbytes for v in top.makes})
            unpack(top.reads, position)
            run(("again", o), top.node, position, map(owner, (*top.reads, *top.makes)),
                sum(values[v].nbytes for v in top.makes))

    for position, node in enumerate(problem.order):
        touches = life.touched[node]
        if problem.backward[position]:
            mine = [number[r] for a in node.all_input_nodes for r in problem.roots[a] if r in number]
            for v in mine:
                if values[v].operation in again:
                    run_again(values[v].operation, position)
            unpack(mine, position)
            if not touches.isdisjoint(number):
                touches = frozenset(owner(number[r]) if r in number else r for r in touches)
        run(node, node, position, touches, life.born.get(node, 0))
        for v in packing.get(position, ()):
            size["packed", v] = packed[v].nbytes
            run(("pack", v), packed[v].encode, position, [values[v].node, ("packed", v)],
                packed[v].nbytes)

    lives = Lifetimes(size, touched, life.kept, born)
    return Outcome(live_bytes(order, lives, lambda key: problem.workspace(held[key]) - problem.over.get(key, 0)), at, order, lives)
