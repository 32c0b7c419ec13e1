"""ATen's operators for the device of `device.c`, computed by the CPU's kernels in that device's memory.

Importing it replaces CUDA's kernels, so that eager steps and the eager lowering have true numbers there.
Operators that only CUDA has (attention of three libraries) have a form of their own below; cuDNN's others are
switched off. Random operators take their numbers from the device's generator, and move it on as a kernel
does, so that what is replayed is drawn again; which numbers those are is not CUDA's. Triton's kernels are
compiled and launched, and compute nothing, or see `device_kernels`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
library = torch.library.Library("aten", "IMPL")

# They make, look at or view memory: CUDA's own do that here too.
OWN = {"empty", "empty_strided", "set_", "resize_", "resize_as_", "_local_scalar_dense", "as_strided", "view",
       "unfold", "_reshape_alias", "alias", "record_stream", "_pin_memory", "is_pinned", "is_set_to",
       "is_same_size", "_fused_sdp_choice"}
# Composite operators whose insides call a CUDA kernel by name.
COMPOSITE = ("copy_", "convolution", "convolution_backward", "native_group_norm", "native_group_norm_backward")


# CUDA's kernel divides by a number of the host's by multiplying with its reciprocal.
DIVIDE = {"aten::div.Tensor": aten.mul.Tensor, "aten::div_.Tensor": aten.mul_.Tensor, "aten::div.out": aten.mul.out}


def host(tensor: Any) -> Any:
    """The same memory as a tensor of the CPU."""
    if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
        return tensor
    nbytes = tensor.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")  # no number
    memory = (ctypes.c_char * nbytes).from_address(tensor.untyped_storage().data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    seen = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    seen = torch._neg_view(seen) if tensor.is_neg() else seen
    seen.of_device = True
    return seen


def on_device(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    host(made).copy_(value)
    return made


def place() -> tuple[int, int]:
    """(seed, offset) of the device's generator, which moves on."""
    device = torch.cuda.default_generators[0]
    if torch.cuda.is_current_stream_capturing():  # numbers are drawn by each replay
        return 0, 0
    offset = device.get_offset()
    device.set_offset(offset + 4)
    return device.initial_seed(), offset


def drawn() -> torch.Generator:
    """A generator for what the device's would draw next."""
    seed, offset = place()
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    declared = operator._schema.arguments
    given = dict(zip((a.name for a in declared), args)) | kwargs
    wanted = {a.name: str(a.type) for a in declared}
    passed = {}
    for name, value in given.items():
        if name == "pin_memory":
            continue
        if isinstance(value, int | float) and "Tensor" in wanted[name]:
            value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        passed[name] = torch.device("cpu") if name == "device" else pytree.tree_map(host, value)
    if passed.get("generator") is not None:
        passed["generator"] = drawn()
    divisor = passed.get("other")
    if operator.name() in DIVIDE and not divisor.dim() and not hasattr(divisor, "of_device"):
        dtype = torch.result_type(passed["self"], divisor)
        if dtype.is_floating_point and dtype.itemsize > 2:  # 16 bits are computed in 32
            operator, passed["other"] = DIVIDE[operator.name()], divisor.to(dtype).reciprocal()
    with torch.no_grad(), torch.random.fork_rng([]):
        if torch.Tag.nondeterministic_seeded in operator.tags:
            torch.default_generator.set_state(drawn().get_state())
        result = operator(**passed)
    if operator is aten.convolution.default and all(t.is_contiguous() for t in args[:2]):
        result = result.contiguous()  # of one channel the CPU's kernel would take either layout
    returns = operator._schema.returns
    values = result if len(returns) > 1 else [result]
    results = [_written(operator, each, given, value) if each.alias_info else pytree.tree_map(on_device, value)
               for each, value in zip(returns, values)]
    return tuple(results) if len(returns) > 1 else results[0] if returns else None


def _written(operator: Any, returned: Any, given: dict[str, Any], value: Tensor) -> Tensor:
    """The argument that was written: an `out` of another size is made the right one."""
    name = next(a.name for a in operator._schema.arguments if a.alias_info is not None
                and a.alias_info.before_set == returned.alias_info.before_set)
    if given[name].shape != value.shape:
        given[name].resize_(value.shape)
        host(given[name]).copy_(value)
    return given[name]


# ---------------------------------------------------------------- attention, as three libraries have it


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool,
              scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(result, seed, offset). A dropout is of the result: as random, if not as CUDA's, of the weights."""
    seen = torch.nn.functional.scaled_dot_product_attention(
        *(host(t).float() for t in (q, k, v)), None if bias is None else host(bias).float(), 0.0, causal, scale=scale)
    seed, offset = place() if p else (0, 0)
    if p:
        seen = seen * _kept(seen.shape, p, seed, offset)
    result = _like_heads(q, v.shape[-1])
    host(result).copy_(seen)
    return result, on_device(torch.tensor(seed)), on_device(torch.tensor(offset))


def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed: int, offset: int,
                       p: float, causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    grad, q_, k_, v_ = (host(t).float() for t in (grad, q, k, v))
    if p:
        grad = grad * _kept(grad.shape, p, seed, offset)
    scale = scale or q.shape[-1] ** -0.5
    scores = q_ @ k_.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    weights = (scores if bias is None else scores + host(bias).float()).softmax(-1)
    by_weights = grad @ v_.mT
    by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True))
    results = by_scores @ k_ * scale, by_scores.mT @ q_ * scale, weights.mT @ grad
    made = [_like_heads(t, t.shape[-1]) for t in (q, k, v)]
    for each, value in zip(made, results):
        host(each).copy_(value)
    return tuple(made)


def _kept(shape: torch.Size, p: float, seed: int, offset: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 * seed + offset)
    return (torch.rand(shape, generator=generator) > p) / (1 - p)


def _like_heads(x: Tensor, width: int) -> Tensor:
    batch, heads, length, _ = x.shape
    return torch.empty(batch, length, heads, width, dtype=x.dtype, device="cuda").transpose(1, 2)


def _made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def efficient(q, k, v, bias, lse, p=0.0, causal=False, *, scale=None):
    result, seed, offset = attention(q, k, v, bias, p, causal, scale)
    return result, _made(*q.shape[:2], -(-q.shape[2] // 32) * 32 if lse else 0), seed, offset


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None):
    assert not mask[3], "the gradient of a bias is not computed here"
    return *attention_backward(grad, q, k, v, bias, int(host(seed)), int(host(offset)), p, causal, scale), None


def flash(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
    result, seed, offset = attention(q, k, v, None, p, causal, scale)
    state = _made(2, dtype=torch.uint64)
    host(state).view(torch.int64).copy_(torch.stack([host(seed), host(offset)]))
    nothing = _made(0, dtype=torch.int32)
    return (result, _made(*q.shape[:3]), nothing, nothing.clone(), q.shape[2], k.shape[2], state,
            _made(dtype=torch.uint64), _made(0, dtype=q.dtype))


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, state, unused, *, scale=None):
    return attention_backward(grad, q, k, v, None, *host(state).view(torch.int64).tolist(), p, causal, scale)


def cudnn(q, k, v, bias, lse, p=0.0, causal=False, debug=False, *, scale=None):
    result, seed, offset = attention(q, k, v, bias, p, causal, scale)
    nothing = _made(0, dtype=torch.int64)
    return (result, _made(*q.shape[:3], 1), nothing, nothing.clone(), q.shape[2], k.shape[2], seed, offset,
            _made(0, dtype=q.dtype))


def cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale=None):
    return attention_backward(grad, q, k, v, bias, int(host(seed)), int(host(offset)), p, causal, scale)


# ---------------------------------------------------------------- graphs


_captured: list[Callable[[], Any]] = []
graphs: dict[int, list[Callable[[], Any]]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_size_t)
def _end(graph: int) -> None:
    graphs[graph] = list(_captured)
    _captured.clear()


@ctypes.CFUNCTYPE(None, ctypes.c_size_t)
def _launch(graph: int) -> None:
    with torch.no_grad():
        for again in graphs[graph]:
            again()


def replayable(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which while a graph is captured changes nothing, but is noted with where it reads and writes, and with
    the numbers that the host gives it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            return kernel(*args, **kwargs)
        given, named = pytree.tree_map(lambda v: host(v) if getattr(v, "is_cuda", True) else v.clone(), (args, kwargs))
        memory = [t.untyped_storage() for t in pytree.tree_leaves((args, kwargs))
                  if isinstance(t, Tensor) and t.device.type == "cuda"]
        before = [(ctypes.string_at(m.data_ptr(), m.nbytes()), m.data_ptr()) for m in memory]
        made = kernel(*args, **kwargs)
        for content, address in before:
            ctypes.memmove(address, content, len(content))
        known = {id(t) for t in pytree.tree_leaves((args, kwargs))}  # written where they are, and not made
        results = [None if id(t) in known else host(t) for t in pytree.tree_leaves(made)]

        def again() -> None:
            for result, new in zip(results, pytree.tree_leaves(kernel(*given, **named))):
                if isinstance(result, Tensor):
                    result.copy_(host(new))

        _captured.append(again)
        return made

    return torch._dynamo.disable(call)


def attend(kind: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    """Have `kernel` compute the operator that `kind`, one of the attentions above, is named for."""
    name, _, backward = kind.__name__.partition("_")
    library.impl(f"_scaled_dot_product_{name}_attention{'_' + backward if backward else ''}", kernel, "CUDA",
                 allow_override=True)


def replace() -> None:
    """Put these in the place of CUDA's kernels, for this process."""
    def registered(key: str) -> set[str]:
        return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

    elsewhere = set().union(*map(registered, ("CPU", "CompositeExplicitAutograd",
                                              "CompositeExplicitAutogradNonFunctional")))
    names = [n for n in registered("CUDA") & elsewhere if n.startswith("aten::")]
    for name in [n.removeprefix("aten::") for n in names] + list(COMPOSITE):
        base, _, overload = name.partition(".")
        operator = getattr(getattr(aten, base, None), overload or "default", None)
        views = operator is None or any(r.alias_info is not None and not r.alias_info.is_write
                                        for r in operator._schema.returns)
        if not views and base not in OWN:
            library.impl(name, replayable(functools.partial(run, operator)), "CUDA", allow_override=True)
    for kind in (efficient, efficient_backward, flash, flash_backward, cudnn, cudnn_backward):
        attend(kind, replayable(kind))
    torch.backends.cudnn.enabled = False
    ctypes.CDLL("libcuda.so.1").without_gpu_graphs(_end, _launch)


replace()
if "TRITON_INTERPRET" in os.environ:
    import device_kernels  # noqa: F401
