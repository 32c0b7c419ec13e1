"""Pieces of a step as Inductor compiles them: each once in the life of the process, however often it is called.

Inductor puts every operator right before its first reader. Gradients of weights that a piece hands on, to be added
up over micro-batches, thus come last, and two activations are held for each. It has an order for the peak, too, that
goes by what is best for the next operator, and mostly makes up for that: but where activations are computed again,
several layers' may then be alive at once. In the schedule's order more loops become one, and what these read is held
for longer. Which of the two needs less differs from piece to piece, and only Inductor's code tells. On CPUs it also turns convolutions
to channels-last, which saves oneDNN's copies, or adds some of its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..collectives import GATHER_INTO, GATHERS_INTO, WAIT
from ..compat import dry_run, inductor
from ..compat import kernels as compat_kernels
from ..compat.trace import pytree
from ..costs import called_by_inductor, workspace_bytes
from ..progress import stage
from ..transfers import TO_HOST
from .donating import given_away
from .pieces import OWNED, Piece
from .storing import is_call, read_before_writes, store_before_updates, store_between

# Left to PyTorch's kernels where an index is a mask, and then only seen in a dry run.
BY_MASK = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)

# Operators whose fake results are new tensors, though they make none of the device.
NO_MEMORY = (TO_HOST, GATHER_INTO, GATHERS_INTO, WAIT)


@dataclass(frozen=True)
class Compiled:
    run: Callable[[list], Any]
    source: str
    kernels: inductor.Kernels


@dataclass(frozen=True)
class Way:
    """How a piece is lowered, as `inductor.compile_graph` has it."""

    in_order: bool = False
    as_traced: bool = False


_cache: dict[tuple[str | None, Way, str], Compiled] = {}


def forget_pieces() -> None:
    _cache.clear()


class Pieces:
    """The distinct pieces of one program, by name: ``bound`` has those that were asked for, in Inductor's way
    until `smaller` is called, and ``new`` the names of those that were not compiled before.

    `begin`: the C++ compiler works on a piece while the next one is lowered. Else it waits for that of the piece's kernels,
    or for `finish`, which comes before the first call. Triton's processes begin at once.
    """

    def __init__(self, parts: Mapping[str, Piece], on_cpu: bool, begin: bool) -> None:
        self.parts, self.on_cpu, self.at_once = parts, on_cpu, begin
        self.bound: dict[str, Compiled] = {}
        self.results = {name: _making(_results_of(part)) for name, part in parts.items()}  # as the last dry run had them
        self.new: list[str] = []
        self._stored: set[str] = set()
        self._way = dict.fromkeys(parts, Way())
        self._tried: set[tuple[str, str]] = set()

    def lower(self, name: str) -> None:
        if name not in self.bound:
            with stage(f"lowering piece {len(self.bound) + 1} of {len(self.parts)}"):
                self.bound[name] = self._compiled(name, Way())

    def smaller(self, name: str) -> bool:
        """Lower a piece in another way that needs less; False where none does, or it is not lowered yet."""
        part = self.parts[name]
        given = [(n.name, n.meta["val"]) for n in part.graph.find_nodes(op="placeholder")]
        for kind, there in (("in_order", sum(map(is_call, part.graph.nodes)) > 1),  # with one call there is little to order
                            ("as_traced", self.on_cpu and inductor.turns_layouts(part.graph))):
            if name not in self.bound or not there or (name, kind) in self._tried:
                continue
            self._tried.add((name, kind))
            way = replace(self._way[name], **{kind: True})
            other = self._compiled(name, way)
            if _peak_bytes(other.source, given) < _peak_bytes(self.bound[name].source, given):
                self.bound[name], self._way[name] = other, way
                return True
        return False

    def dry_calls(self, branch: bool, names: Collection[str]) -> dict[str, Callable[[list], Any]]:
        """What stands for each piece in a dry run: for those of these `names` that are lowered all that they allocate, for
        others nothing but their results."""
        return {name: self._noted(name, branch) if name in names and name in self.bound else results
                for name, results in self.results.items()}

    def branches(self, names: Iterable[str]) -> set[bool]:
        return {b for name in names if name in self.bound for b in dry_run.branches(self.bound[name].source)} or {True}

    def _noted(self, name: str, branch: bool) -> Callable[[list], list]:
        call = dry_run.dry_call(self.bound[name].source, branch)

        def run(given: list) -> list:
            storages = [(weakref.ref(value.untyped_storage()), i) for i, value in enumerate(given) if isinstance(value, Tensor)]
            # A view, of what was written over say, holds what it is of; Inductor's own do not.
            results = [r.detach() if isinstance(r, Tensor) else r for r in call(given)]
            alive = {storage()._cdata: i for storage, i in storages if storage() is not None}
            self.results[name] = _making(_as_made(results, alive))
            return results

        return run

    def finish(self) -> None:
        try:
            for piece in self.bound.values():
                piece.kernels.begin()
            for i, piece in enumerate(self.bound.values(), 1):
                with stage(f"compiling the kernels of piece {i} of {len(self.bound)}"):
                    piece.kernels.finish()
        except BaseException:  # what has no kernels may not be used again
            for key in [key for key, piece in _cache.items() if piece in self.bound.values()]:
                del _cache[key]
            raise

    def _compiled(self, name: str, way: Way) -> Compiled:
        part = self.parts[name]
        key = (part.key, way, str(inductor.settings()))
        if key in _cache:
            return _cache[key]
        if name not in self._stored:
            read_before_writes(part.graph)
            store_between(part.graph)
            store_before_updates(part.graph)
            self._stored.add(name)
        if name not in self.new:
            self.new.append(name)
        kernels = inductor.Kernels()
        with kernels.put_off(begin=self.at_once):
            compiled = Compiled(*inductor.compile_graph(part.module(), given=given_away(part.graph), **asdict(way)), kernels)
        if part.key is not None:
            _cache[key] = compiled
        return compiled


@dataclass(frozen=True)
class _Result:
    """A tensor that a piece gives."""

    layout: tuple[Any, Any]  # size, stride
    dtype: torch.dtype
    device: torch.device
    # Where it is not all of a storage of its own: the place of the input whose storage it is in or, below 0, the number of one
    # that others may be in too; the bytes of that; and its offset.
    within: tuple[int, int, int] | None = None

    def made(self, storages: dict[int, Tensor]) -> Tensor:
        if self.within is None:
            return torch.empty_strided(*self.layout, dtype=self.dtype, device=self.device)
        place, nbytes, offset = self.within
        if place not in storages:
            storages[place] = torch.empty(nbytes, dtype=torch.uint8, device=self.device).view(self.dtype)
        return torch.as_strided(storages[place], *self.layout, offset).detach()


def _results_of(part: Piece) -> list[Any]:
    """As the graph has them, each in a storage of its own."""
    def result(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _Result(tuple(tuple(map(_number, each)) for each in (value.shape, value.stride())), value.dtype, value.device)

    return [result(n.meta["val"]) if isinstance(n, fx.Node) else n for n in part.graph.output_node().args[0]]


def _as_made(results: list, places: Mapping[int, int]) -> list[Any]:
    """As a dry run had them, where its inputs' storages that are still alive have these `places`."""
    number: dict[int, int] = {}
    storages = Counter(value.untyped_storage()._cdata for value in results if isinstance(value, Tensor))

    def result(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage, nbytes = value.untyped_storage()._cdata, value.untyped_storage().nbytes()
        exact = value.itemsize * (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride()))) if value.numel() else 0
        place = places[storage] if storage in places else number.setdefault(storage, -1 - len(number))
        own = place < 0 and storages[storage] == 1 and nbytes == exact
        return _Result((value.shape, value.stride()), value.dtype, value.device,
                       None if own else (place, nbytes, value.storage_offset()))

    return [result(value) for value in results]


def _making(results: list[Any]) -> Callable[[list], list]:
    """What frees its inputs and makes these and nothing else."""
    within = {r.within[0] for r in results if isinstance(r, _Result) and r.within and r.within[0] >= 0}

    def run(given: list) -> list:
        storages = {place: given[place] for place in within}
        given.clear()
        return [r.made(storages) if isinstance(r, _Result) else r for r in results]

    return run


def watch(inputs: list[Any]) -> dry_run.AllocationWatch:
    """Counts what a dry run makes beyond `inputs`."""
    return dry_run.AllocationWatch(inputs, library_workspace, NO_MEMORY)


def library_workspace(target: Any, args: Any, kwargs: Any) -> int:
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())  # with `fallback_random`, and some always
    called = draws or target in BY_MASK or compat_kernels.falls_back(target) or called_by_inductor(
        target, pytree.tree_leaves((args, kwargs)))
    return workspace_bytes(target, args, kwargs) if called else 0


def stand_in(value: Any) -> Any:
    """A fake tensor like `value`, with numbers for symbolic sizes."""
    if isinstance(value, Tensor):
        return torch.empty_strided([_number(n) for n in value.shape], [_number(n) for n in value.stride()],
                                   dtype=value.dtype, device=value.device)
    return _number(value)


def _number(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value


def _peak_bytes(source: str, given: list[tuple[str, Any]]) -> int:
    """The most bytes that one call of a piece has made or holds of what it is `given`, by name, to be freed."""
    peaks = []
    for branch in dry_run.branches(source):
        with dry_run.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            kept = {name: stand_in(value) for name, value in given if name.startswith(OWNED)}
            with watch(list(kept.values())) as seen:
                call = dry_run.dry_call(source, branch)
                call([kept[name] if name in kept else stand_in(value) for name, value in given])
        peaks.append(seen.peak_bytes)
    return max(peaks)
