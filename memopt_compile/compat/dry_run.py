"""What Inductor's program of a graph allocates, by a run of its wrapper on fake tensors that computes nothing.

The wrapper is read as the text that Inductor writes, which is private; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.select_algorithm import extern_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = ["AllocationWatch", "FakeTensorMode", "dry_call"]


@functools.lru_cache(maxsize=256)
def branches(source: str) -> tuple[bool, ...]:
    """What `dry_call` can be told of conditions: between them these runs take each branch of ``torch.cond``."""
    return (True, False) if any(isinstance(n, ast.If) and n.orelse for n in ast.walk(ast.parse(source))) else (True,)


@functools.lru_cache(maxsize=256)  # a program is run once for each piece that is lowered
def dry_call(source: str, branch: bool = True) -> Callable[[list], Any]:
    """The wrapper in `source` as a function that allocates and frees as it does, and computes
    nothing.

    Its ``call`` runs with every kernel replaced by nothing: called on fake tensors it leaves
    exactly Inductor's own allocations, reuses and deletions. Operators that Inductor hands
    back to PyTorch run on the fake tensors, and so allocate their results. Numbers are not
    known: every condition is `branch`, and a ``while_loop`` has two rounds, the second beside
    what the first has left.
    """
    tree = _Decided(branch).visit(ast.parse(source))
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")
    if call.args.args[0].arg == "self":
        call.args.args.pop(0)
    graphs = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in _names(call)]  # of loops, branches
    for node in [call, *graphs]:
        node.decorator_list = []
    body = ast.Module([*graphs, call], [])
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "run":
            node.args = []  # of a Triton kernel: numbers are read from tensors there, and fake ones have none
    scope: dict[str, Any] = {name: _Nothing() for name in _names(body) if not hasattr(builtins, name)}
    scope |= {"torch": torch, "aten": torch.ops.aten, "math": math, "device": torch.device,
              "extern_kernels": _Externs(), "reinterpret_tensor": torch.as_strided}
    scope |= {name: _allocator(name) for name in scope if name.startswith("empty_strided_")}
    exec(compile(ast.fix_missing_locations(body), "<dry run>", "exec"), scope)
    return scope["call"]


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class _Decided(ast.NodeTransformer):
    def __init__(self, branch: bool) -> None:
        self.branch = branch

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        self.generic_visit(node)
        return node.body if self.branch and node.orelse else node.orelse  # without `else`: of a loop with no round

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        self.generic_visit(node)
        return [*node.body, *copy.deepcopy(node.body)]


class AllocationWatch(TorchDispatchMode):
    """Counts the bytes of the storages that operators make within it, while they live; not of those that
    operators `elsewhere` make, which are none of the device's."""

    def __init__(self, inputs: Sequence[Any], workspace: Callable[..., int],
                 elsewhere: Sequence[Any] = ()) -> None:
        super().__init__()
        self.workspace, self.elsewhere = workspace, elsewhere
        self.inputs = list(inputs)  # held, so that no new storage takes the place of one
        self.known: dict[int, Any] = {i.untyped_storage()._cdata: None for i in self.inputs
                                      if isinstance(i, Tensor)}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        largest = LARGEST.get(func)
        result = largest(*args) if largest else func(*args, **(kwargs or {}))
        before = self.live_bytes
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self._see(value.untyped_storage(), value.device.type, func not in self.elsewhere)
        if self.live_bytes > before or result is None or func._schema.is_mutable:  # made its result, or wrote in place
            self.run(func, args, kwargs or {})
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count what an operator holds while it runs, beside its result."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self.workspace(func, args, kwargs))

    def _see(self, storage: Any, device: str, counts: bool) -> None:
        place = storage._cdata
        if place in self.known:
            return
        size = storage.nbytes() if counts else 0
        if device == "cuda":
            size = -(-size // 512) * 512  # what PyTorch's CUDA allocator rounds to

        def gone(_: Any) -> None:
            self.live_bytes -= size
            del self.known[place]

        self.known[place] = weakref.ref(storage, gone)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _positions(value: Tensor) -> Tensor:
    return value.new_empty((value.numel(), value.dim()), dtype=torch.int64)


def _chosen(value: Tensor, places: Sequence[Tensor | None]) -> Tensor:
    """``value[places]`` where a mask among `places` keeps all."""
    given: list[Tensor | None] = []
    for place in places:
        is_mask = place is not None and place.dtype == torch.bool
        given += [place.new_empty(place.numel(), dtype=torch.int64)] * place.dim() if is_mask else [place]
    return aten.index.Tensor(value, given)


def _different(value: Tensor, ordered: bool = True, inverse: bool = False, counts: bool = False) -> tuple[Tensor, ...]:
    sizes = (value.shape if inverse or counts else 0, value.numel() if counts else 0)
    return value.new_empty(value.numel()), *(value.new_empty(size, dtype=torch.int64) for size in sizes)


# What results of operators have whose sizes only the data tell, at most.
aten = torch.ops.aten
LARGEST: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _positions, aten.index.Tensor: _chosen, aten._unique2.default: _different,
    aten.masked_select.default: lambda value, mask: value.new_empty(torch.broadcast_shapes(value.shape, mask.shape)).view(-1)}


def _allocator(name: str) -> Callable[..., Tensor]:
    device = name.removeprefix("empty_strided_").removesuffix("_pinned")

    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


class _Nothing:
    """Stands for a kernel, a stream, a device guard: may be used in any way, to no effect."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Externs:
    """Library calls: into a given result they allocate nothing but workspace, else they make a new one."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(extern_kernels, name)(*args, **kwargs)
            watch, operator = _get_current_dispatch_mode(), getattr(aten, name, None)
            if isinstance(watch, AllocationWatch) and operator is not None:
                watch.run(operator.default, args, kwargs)

        return run
