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

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import compat_dry_run, compat_inductor, compat_kernels, slab_kernels
from ..arena import WINDOW
from ..between import host_call, in_its_place, read_by_program
from ..collectives import GATHER_INTO, GATHERS_INTO, WAIT
from ..costs import is_library, workspace_bytes
from ..errors import OptionError
from ..finiteness import not_looking
from ..inlining import inlined
from ..pieces import (
    OWNED,
    Piece,
    can_cut,
    constant,
    is_host,
    is_view,
    one_piece,
    pieces,
    root,
)
from ..read_back import read_back
from ..step_graph import StepGraph, op_name
from ..storing import is_call, store_before_updates, store_between
from ..transfers import TO_HOST, is_transfer

# Left to PyTorch's kernels where an index is a mask, and then only seen in a dry run.
BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)

# Operators whose fake results are new tensors, though they make none of the device.
NO_MEMORY = (TO_HOST, GATHER_INTO, GATHERS_INTO, WAIT)

decompositions = compat_inductor.decompositions
prepare = compat_inductor.joint_graph_passes
warm_up = compat_inductor.warm_up


def compiler_available(device: torch.device | str = "cpu") -> bool:
    """Whether Inductor can generate code for `device`: a C++ compiler, or Triton."""
    if torch.device(device).type == "cpu":
        return compat_inductor.has_cpp_compiler()
    return compat_inductor.has_triton()


@dataclass(frozen=True)
class _Compiled:
    run: Callable[[list], Any]
    source: str
    kernels: compat_inductor.Kernels


_cache: dict[tuple[str | None, str], _Compiled] = {}


def forget() -> None:
    """Drop all compiled pieces: for `torch.compiler.reset`."""
    _cache.clear()
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


def lower(step: StepGraph, *, whole: bool = False, later: bool = False, tight: bool = False) -> Lowered:
    """Compile the step's pieces and the program that calls them.

    `later`: the C++ compiler, which takes most of the time, waits until `finish` is called: a program of which only
    the peak is asked does without it. `tight`: a few bytes less are worth more time for compilation.
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
        parts = pieces(step)
    settings = compat_inductor.settings()
    names: dict[Any, str] = {}
    bound: dict[str, _Compiled] = {}
    called, new = [], {}
    on_cpu = _on_cpu(step)
    for part in parts:
        name = names.setdefault(part.key or part, f"piece_{len(names)}")
        called.append(name)
        if name not in bound:
            key = (part.key, f"{tight} {settings}")
            if key not in _cache:
                new[name] = key
                store_between(part.graph)
                store_before_updates(part.graph)
            bound[name] = _cache.get(key) or _compiled(part, on_cpu, later, tight)
    _cache.update((key, bound[name]) for name, key in new.items() if key[0] is not None)

    def finish() -> None:
        try:
            for piece in bound.values():
                piece.kernels.begin()
            for piece in bound.values():
                piece.kernels.finish()
        except BaseException:  # what has no kernels may not be used again
            for key in [key for key, piece in _cache.items() if piece in bound.values()]:
                del _cache[key]
            raise

    if not later:
        finish()
    text, objects = source(step, list(zip(called, parts)))
    run = _load(text, {**objects, **{name: c.run for name, c in bound.items()}})
    values = [n.meta["val"] for n in step.placeholders]

    def peak() -> int:
        branches = {branch for c in bound.values() for branch in compat_dry_run.branches(c.source)}
        dry = [{name: compat_dry_run.dry_call(c.source, b) for name, c in bound.items()} for b in branches]
        return max(_dry_peak(text, {**objects, **calls}, values) for calls in dry)

    return Lowered(run, text, tuple(called), tuple(new), peak, finish)


def predicted_transient_peak(lowered: Lowered) -> int:
    """Bytes beyond the inputs at the worst moment of a run, by a dry run of the program on
    fake tensors: Inductor's own allocations, reuses and deletions without its kernels."""
    return lowered.transient_peak_bytes()


def _compiled(part: Piece, on_cpu: bool, later: bool, tight: bool) -> _Compiled:
    """The piece as Inductor makes it. If it is to be `tight`, in the schedule's order too, and the one that needs less.

    Inductor puts every operator right before its first reader. Gradients of weights that a piece hands on, to be
    added up over micro-batches, thus come last, and two activations are held for each. It has an order for the peak,
    too, that goes by what is best for the next operator, and mostly makes up for that: but where activations are
    computed again, several layers' may then be alive at once. In the schedule's order more loops become one, and what
    these read is held for longer.
    """
    # (Without calls of a library, or with one, there is little to order.)
    orders = (False, True) if tight and sum(map(is_call, part.graph.nodes)) > 1 else (False,)
    given = [(n.name, n.meta["val"]) for n in part.graph.find_nodes(op="placeholder")]
    found = []
    for in_order in orders:
        kernels = compat_inductor.Kernels()
        # Triton's kernels are wanted by Inductor as soon as a graph is lowered; those of a CPU can come later.
        begin = not (later or tight)
        with kernels.put_off(begin=begin) if on_cpu else contextlib.nullcontext():
            found.append(_Compiled(*compat_inductor.compile_graph(part.module(), in_order=in_order), kernels))
    return min(found, key=lambda each: _piece_peak(each.source, given)) if len(found) > 1 else found[0]


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


def _dry_peak(text: str, objects: dict[str, Any], values: list[Any]) -> int:
    """The most bytes that a run of the program on fake tensors of these sizes has allocated."""
    with compat_dry_run.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        inputs = [_stand_in(v) for v in values]
        run = _load(text, objects)
        with compat_dry_run.AllocationWatch(inputs, library_workspace, NO_MEMORY) as watch:
            run(list(inputs))
    return watch.peak_bytes


def _piece_peak(source: str, given: list[tuple[str, Any]]) -> int:
    """The most bytes that one call of a piece has made or holds of what it is `given`, by name, to be freed."""
    peaks = []
    for branch in compat_dry_run.branches(source):
        with compat_dry_run.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            kept = {name: _stand_in(value) for name, value in given if name.startswith(OWNED)}
            with compat_dry_run.AllocationWatch(list(kept.values()), library_workspace, NO_MEMORY) as watch:
                call = compat_dry_run.dry_call(source, branch)
                call([kept[name] if name in kept else _stand_in(value) for name, value in given])
        peaks.append(watch.peak_bytes)
    return max(peaks)


def library_workspace(target: Any, args: Any, kwargs: Any) -> int:
    called = is_library(target) or compat_kernels.falls_back(target) or target in BY_MASK
    return workspace_bytes(target, args, kwargs) if called else 0


def _stand_in(value: Any) -> Any:
    """A fake tensor like `value`, with numbers for symbolic sizes."""
    if isinstance(value, Tensor):
        return torch.empty_strided([_number(n) for n in value.shape],
                                   [_number(n) for n in value.stride()],
                                   dtype=value.dtype, device=value.device)
    return _number(value)


def _number(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value
