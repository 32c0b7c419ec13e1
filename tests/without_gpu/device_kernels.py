"""What Triton's interpreter lacks for the kernels that Inductor writes: CUDA's library of functions, and pace.

With TRITON_INTERPRET=1 Inductor gives its kernels to Triton's interpreter, which computes them by NumPy where
their tensors are; on the device of `device.c` it finds them in the host's memory. So Inductor's lowering has
true numbers there, slowly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, ReduceOps, TensorHandle

# By the library's name; others have PyTorch's.
BY_TORCH = {"fmod": torch.fmod, "ilogb": lambda x: torch.frexp(x).exponent - 1, "ldexp": torch.ldexp,
            "nearbyint": torch.round, "rint": torch.round, "llrint": lambda x: torch.round(x).to(torch.int64),
            "atan": torch.atan, "tgamma": lambda x: torch.lgamma(x).exp(), "isinfd": torch.isinf, "isnand": torch.isnan,
            "sinpi": lambda x: torch.sin(x * math.pi), "cospi": lambda x: torch.cos(x * math.pi)}


def by_torch(name: str, *given: Any) -> tl.tensor:
    """The function `name` of the library, of a kernel's tensors."""
    function = BY_TORCH.get(name) or getattr(torch, name, None) or getattr(torch.special, name)
    like = next(each for each in given if isinstance(each, tl.tensor))
    values = [torch.from_numpy(np.asarray(each.handle.data if isinstance(each, tl.tensor) else each)) for each in given]
    made = function(*values).numpy()
    scalar = like.dtype if made.dtype == like.handle.data.dtype else tl.dtype(
        "int1" if made.dtype == np.bool_ else {"f": "fp"}.get(made.dtype.kind, "int") + str(made.itemsize * 8))
    return tl.tensor(TensorHandle(made, scalar), like.type.with_element_ty(scalar) if like.type.is_block() else scalar)


for name in [name for name in vars(libdevice) if not name.startswith("_")]:
    setattr(libdevice, name, functools.partial(by_torch, name))


def reduced(operation: ReduceOps, given: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """A reduction by halves, as on a GPU: the interpreter's own goes from element to element."""
    given, axis = operation.unravel(given, operation.axis)
    dtypes, parts = [t.dtype for t in given], [np.moveaxis(t.handle.data, axis, 0) for t in given]
    while (half := len(parts[0]) // 2):
        made = operation.combine_fn.fn(*(operation.to_tensor(part[at], dtype) for at in (slice(half), slice(half, None))
                                         for part, dtype in zip(parts, dtypes)))
        parts = [t.handle.data for t in (made if isinstance(made, tuple) else (made,))]
    if not operation.keep_dims:
        return [operation.to_tensor(part[0], dtype) for part, dtype in zip(parts, dtypes)]
    assert operation.axis is not None
    return [operation.to_tensor(np.moveaxis(part, 0, axis), dtype) for part, dtype in zip(parts, dtypes)]


ReduceOps.generic_reduce = reduced
_replaced: set[int] = set()


def called(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A device function. For each call the interpreter would replace the whole language anew, as it is by then."""
    if id(function.fn.__globals__) not in _replaced:
        _replaced.add(id(function.fn.__globals__))
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = called


BLOCK = 1 << 16  # elements: the larger the blocks, the fewer of them go through Python


def prepared(grid_of: Callable[..., Any], kernel: Any, args: tuple, config: Any) -> Any:
    """The kernel's arguments and its grid, of large blocks, and each float of the type that the kernel is compiled
    for, where the interpreter would take it for a literal, and a 0-dim tensor of the host for a pointer."""
    if list(config.kwargs) in (["XBLOCK"], ["XBLOCK", "R0_BLOCK"]):
        each = math.prod(size for name, size in kernel.size_hints.items() if name != "x")
        config.kwargs["XBLOCK"] = max(config.kwargs["XBLOCK"], min(kernel.size_hints["x"], BLOCK // each))
    args, grid = grid_of(kernel, args, config)
    declared = [kind for name, kind in kernel.triton_meta["signature"].items() if name not in config.kwargs]
    kinds = {"fp64": (tl.float64, np.float64), "fp32": (tl.float32, np.float32)}
    return tuple(tl.tensor(TensorHandle(np.array([float(arg)], kinds[kind][1]), kinds[kind][0]), kinds[kind][0])
                 if kind in kinds else arg for arg, kind in zip(args, declared, strict=True)), grid


CachingAutotuner._interpret_args_grid = (
    lambda kernel, args, config, grid_of=CachingAutotuner._interpret_args_grid: prepared(grid_of, kernel, args, config))


def restored(executor: GridExecutor, args: tuple, on_host: list, kwargs: dict, kwargs_on_host: dict) -> None:
    """Bring back what a kernel has written. (The interpreter's own function refers to itself, and so holds the tensors
    until Python's collector comes by.)"""
    for given, copy in (*zip(args, on_host), *((kwargs[name], kwargs_on_host[name]) for name in kwargs)):
        if hasattr(given, "data_ptr"):
            given.untyped_storage().copy_(copy.untyped_storage())


GridExecutor._restore_args_dev = restored


def language(tensor: Any, scope: Any, replace: Callable[..., None] = interpreter._patch_lang_tensor) -> None:
    replace(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # NumPy makes no number of `[3]` any more


interpreter._patch_lang_tensor = language
