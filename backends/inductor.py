"""Inductor lowering: the step as a few compiled pieces and a program that calls them in order.

The step is cut by `pieces`; each distinct piece is compiled once in the life of the process,
so that neither depth nor a second capture costs compile time. The program is generated and
printable (`Lowered.source`):

1. Pieces run in the step's order: the plan is what happens.
2. A value is let go at its last use. It is handed over in a list that the piece empties, so
   the piece can free it before it returns.
3. What no piece may hold (views among the results, numbers, seeds; see `pieces`) the program
   computes itself.

``whole=True``, and steps that cannot be cut (dynamic sizes, for one), make one big piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..arena import WINDOW
from ..compat import dry_run
from ..compat import inductor as compat_inductor
from ..errors import OptionError
from ..finiteness import not_looking
from ..liveness import timeline
from ..lowering import slab_kernels
from ..lowering.between import host_call, in_its_place, read_by_program
from ..lowering.compiled_pieces import Pieces, forget_pieces, stand_in, watch
from ..lowering.donating import Owners, donating, given_away
from ..lowering.inlining import inlined
from ..lowering.pieces import Piece, can_cut, constant, is_host, is_view, one_piece, pieces, root
from ..lowering.read_back import read_back
from ..step_graph import StepGraph, op_name
from ..transfers import is_transfer

decompositions = compat_inductor.decompositions
prepare = compat_inductor.joint_graph_passes
warm_up = compat_inductor.warm_up


def compiler_available(device: torch.device | str = "cpu") -> bool:
    """Whether Inductor can generate code for `device`: a C++ compiler, or Triton."""
    if torch.device(device).type == "cpu":
        return compat_inductor.has_cpp_compiler()
    return compat_inductor.has_triton()


def forget() -> None:
    """Drop all compiled pieces: for `torch.compiler.reset`."""
    forget_pieces()
    slab_kernels.forget()


@dataclass(frozen=True, eq=False)
class Lowered:
    """A boxed callable: takes the list of inputs, empties it, returns the tuple of outputs.

    ``called`` has one name for each call of a piece, ``compiled`` those that this lowering had
    to compile. `finish`, once, comes before the first call.
    """

    run: Callable[[list], tuple]
    source: str
    called: tuple[str, ...]
    compiled: tuple[str, ...]
    transient_peak_bytes: Callable[[], int]
    finish: Callable[[], None]

    _boxed_call = True

    def __call__(self, inputs: list) -> tuple:
        return self.run(inputs)

    @property
    def distinct(self) -> int:
        return len(set(self.called))


@dataclass(frozen=True, eq=False)
class TooLarge:
    """A program that has more than it may, as was seen before all of its pieces were lowered."""

    least_bytes: int  # of the transient peak
    lowered: Callable[[], Lowered]


def lower(step: StepGraph, *, whole: bool = False, later: bool = False, within: int | None = None,
          aim: float = math.inf) -> Lowered | TooLarge:
    """Compile the step's pieces and the program that calls them.

    `later`: the C++ compiler, which takes most of the time, waits until `finish` is called: a program of which only
    the peak is asked does without it.

    `within`: bytes for the transient peak; `finish` is then the caller's, for the program that is taken. The pieces
    where the schedule has most alive are lowered first. While the peak is above, the piece that it is in is lowered in
    another way that needs less; once there is none, no other piece's could help, and the program is too large.

    `aim`: bytes for the transient peak of a program that may have more: only pieces that are above are lowered in another way.
    """
    step = read_back(inlined(step, decompositions()))
    if whole or not can_cut(step):
        if any(map(is_transfer, step.computing())):
            raise OptionError("the step is one piece for Inductor, and copies go between pieces",
                              where="offload=True", do="leave offload out, or take lowering='eager'")
        if step.graph.find_nodes(op="call_function", target=WINDOW):
            raise OptionError("the step is one piece for Inductor, and tenants are written between pieces",
                              where="arena=True", do="leave arena out, or take lowering='eager'")
        step = not_looking(step)
        parts = [one_piece(step)]
    else:
        parts = donating(step, pieces(step))
    names: dict[Any, str] = {}
    called = [names.setdefault(part.key or part, f"piece_{len(names)}") for part in parts]
    distinct = dict(zip(reversed(called), reversed(parts)))
    made = Pieces(distinct, _on_cpu(step), begin=not later and within is None)
    text, objects = source(step, list(zip(called, parts)))
    values = [n.meta["val"] for n in step.placeholders]
    given = {name: given_away(part.graph) for name, part in distinct.items()}

    def peaks(*names: str) -> dict[str, int]:
        """Bytes in each piece, of those not in `names` with nothing but their results."""
        runs = [_dry_peaks(text, objects, made.dry_calls(branch, names), values, given) for branch in made.branches(names)]
        return {name: max(run[name] for run in runs) for name in runs[0]}

    highest = {} if within is None else peaks()  # of what is lowered so far
    most = aim if within is None else within

    def fits(*lowered: str) -> bool:
        """Whether the program does, now that these are. What a piece has beside its results is alive in it alone, so that the
        others need not be run for that."""
        for name in lowered:
            highest[name] = peaks(name)[name]
        while highest[worst := max(highest, key=highest.__getitem__)] > most:
            if not (worst and made.smaller(worst)):
                return False
            highest[worst] = peaks(worst)[worst]
        return True

    def program() -> Lowered:
        missing = [name for name in distinct if name not in made.bound]
        for name in missing:
            made.lower(name)
        if within is not None:
            fits(*missing)
        elif aim < math.inf:
            before = None
            while made.bound != before:  # what another way hands on may lie otherwise
                before = dict(made.bound)
                highest.update(peaks(*distinct))
                fits()
        run = _load(text, {**objects, **{name: c.run for name, c in made.bound.items()}})
        known = highest if within is None else {}  # with a budget each was run beside nothing but the others' results
        return Lowered(run, text, tuple(called), tuple(made.new), lambda: max((known or peaks(*distinct)).values()), made.finish)

    if within is not None:
        if not fits():  # what is handed from piece to piece is too much
            return TooLarge(max(highest.values()), program)
        for name in _by_live_bytes(step, called, parts):
            made.lower(name)
            if not fits(name):
                return TooLarge(max(highest.values()), program)
            if not later:
                made.bound[name].kernels.begin()
    lowered = program()
    if within is None and not later:
        made.finish()
    return lowered


def keeps_order(step: StepGraph, pieces: bool) -> bool:
    """Whether what runs between pieces runs in the order of the schedule: one piece has an order of Inductor's."""
    return pieces and can_cut(step)


def _by_live_bytes(step: StepGraph, called: list[str], parts: list[Piece]) -> list[str]:
    """Names of the pieces, those first in which the schedule has most alive."""
    begin, most = {part.first: name for name, part in zip(called, parts)}, dict.fromkeys(called, 0)
    name = None  # until the first piece begins
    for point in timeline(step).points:
        name = begin.get(point.node, name)
        if name:
            most[name] = max(most[name], point.live_bytes)
    return sorted(most, key=most.__getitem__, reverse=True)


def predicted_transient_peak(lowered: Lowered) -> int:
    """Bytes beyond the inputs at the worst moment of a run, by a dry run of the program on
    fake tensors: Inductor's own allocations, reuses and deletions without its kernels."""
    return lowered.transient_peak_bytes()


def _on_cpu(step: StepGraph) -> bool:
    return all(v.device.type == "cpu" for n in step.placeholders if isinstance(v := n.meta["val"], Tensor))


# ------------------------------------------------------------------------ the program


class _Line(NamedTuple):
    """``result = function(arguments)``; a piece takes them in one list."""

    result: str
    function: str
    arguments: list[str]
    piece: bool


def source(step: StepGraph, calls: list[tuple[str, Piece]]) -> tuple[str, dict[str, Any]]:
    """The program as text, and the objects it names (the pieces aside)."""
    names = {n: f"a{i}" for i, n in enumerate(step.placeholders)}
    objects: dict[str, Any] = {}
    for node in step.graph.find_nodes(op="get_attr"):
        names[node] = f"c{len(objects)}"
        objects[names[node]] = constant(step, node)
    lines: list[_Line] = []

    def compute(node: fx.Node) -> None:
        """Have the program run `node` itself, and what that needs."""
        if node in names:
            return
        if not (is_host(node) or is_view(node)):
            names[node] = names[root(node)]
            return
        reads = read_by_program(node)
        for argument in reads:
            compute(argument)
        names[node] = f"v{len(names)}"
        function = f"f{len(objects)}_{op_name(node).split('.')[0]}"
        objects[function] = host_call(node)
        lines.append(_Line(f"{names[node]} = ", function, [names[a] for a in reads], piece=False))

    place = {n: i for i, n in enumerate(step.graph.nodes)}
    waiting = [n for n in step.graph.nodes if in_its_place(n)]
    for name, piece in calls:
        while waiting and piece.first and place[waiting[0]] < place[piece.first]:
            compute(waiting.pop(0))
        for node in piece.inputs:
            compute(node)
        made = [f"v{len(names) + i}" for i in range(len(piece.outputs))]
        results = "[" + ", ".join(made) + "] = " if made else ""
        lines.append(_Line(results, name, [names[n] for n in piece.inputs], piece=True))
        names.update((n, v) for n, v in zip(piece.outputs, made) if isinstance(n, fx.Node))
    results = tuple(step.graph.output_node().args[0])
    for value in results:
        if isinstance(value, fx.Node):
            compute(value)
    given = [names[v] if isinstance(v, fx.Node) else repr(v) for v in results]
    constants = [name for name in objects if name[0] == "c"]
    return _text([names[n] for n in step.placeholders], lines, given, constants), objects


def _text(inputs: list[str], lines: list[_Line], results: list[str],
          kept: Iterable[str]) -> str:
    last = {name: i for i, line in enumerate(lines) for name in line.arguments}
    last.update((name, len(lines)) for name in (*results, *kept))
    text = ["def run(inputs):"]
    if inputs:
        text.append(f"    [{', '.join(inputs)}] = inputs")
    text.append("    inputs.clear()")
    for i, line in enumerate(lines):
        given = ", ".join(line.arguments)
        dead = ", ".join(a for a in dict.fromkeys(line.arguments) if last[a] == i)
        if line.piece and dead:
            # The list alone holds them from here on, and the piece empties the list.
            text += [f"    given = [{given}]", f"    del {dead}",
                     f"    {line.result}{line.function}(given)"]
        elif line.piece:
            text.append(f"    {line.result}{line.function}([{given}])")
        else:
            text.append(f"    {line.result}{line.function}({given})")
            text += [f"    del {dead}"] if dead else []
    text.append(f"    return ({''.join(r + ', ' for r in results)})")
    return "\n".join(text) + "\n"


def _load(text: str, objects: dict[str, Any]) -> Callable[[list], tuple]:
    scope = dict(objects)
    exec(compile(text, "<memopt inductor step>", "exec"), scope)
    return scope["run"]


# ------------------------------------------------------------------------ predicted peak


def _dry_peaks(text: str, objects: dict[str, Any], calls: dict[str, Callable], values: list[Any],
               given_away: dict[str, list[int]]) -> dict[str, int]:
    """The most bytes that a run of the program on fake tensors of these sizes has allocated, in each piece, by name, and
    between pieces ("")."""
    peaks = dict.fromkeys([*calls, ""], 0)  # of pieces first, which `max` is to find

    def note(name: str) -> None:
        peaks[name] = max(peaks[name], seen.peak_bytes)
        seen.peak_bytes = seen.live_bytes

    def noting(name: str) -> Callable:
        def run(given: list) -> Any:
            note("")
            for place in given_away[name]:
                owners.give(given[place])
            owners.add(results := calls[name](given))
            note(name)
            return results

        return run

    with dry_run.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        inputs = [stand_in(v) for v in values]
        owners = Owners(inputs)
        run = _load(text, {**objects, **{name: noting(name) for name in calls}})
        with watch(inputs) as seen:
            run(list(inputs))
    note("")
    return peaks
