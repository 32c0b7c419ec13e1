"""What running an operator costs beyond its result: workspace, found by running it once.

Some operators hold memory while they run that is neither operand nor result: reordered copies
in a convolution, partial sums in a backward, an index in sorted order. No table knows them all,
so each distinct call (operator, shapes, strides, dtypes, constants) is run once on made-up
tensors under the allocation recorder, and the answer is kept for the process. Views hold nothing and
are not run. Pointwise operators hold copies of operands in other dtypes than their result; those that cast nothing
are run on one element each, for the tensors that their numbers become. They are run on the CPU; on a GPU those
that are known to hold something there (`ON_A_GPU`), if the memory that is free takes their operands, and the rest is
taken to hold nothing: what a kernel does not like in made-up operands may end the process's use of the device. Ours
hold as much on a CPU and are run there.
Operators of other libraries are not run, since they may do more than compute. One with a body of its own
(`torch.cond`) holds what is alive in that. Collectives are not run either, since the other ranks would take
part: what gloo holds is known (`of_gloo`). While a profiler records, nothing can be run under a second one.
"""

from __future__ import annotations

import functools
import logging
import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from . import ctc
from .collectives import is_collective, is_wait, launch_of, whole_bytes
from .compat.trace import hinted, profiler_active, pytree, real_tensors
from .devices import free_bytes
from .distributed import planned
from .fusing import fused
from .in_slabs import IN_SLABS_, of_one_slab
from .liveness import Workspace, lifetimes, live_bytes, no_workspace
from .measure import measure
from .quantization.operators import few_slabs
from .stand_ins import stand_ins
from .step_graph import OF_TORCH, OPERATOR, StepGraph, nbytes

# What Inductor leaves to PyTorch's own kernels, and to ours, by the start of the operator's name: only
# these hold workspace there. The rest becomes loops of its own.
LIBRARY = ("convolution", "_scaled_dot_product", "_convolution", "mkldnn", "_fft", "_cudnn", "miopen",
           "cudnn", "sort", "topk", "linalg", "_linalg", "quantize", "compiled_update", "ctc_loss")

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # also PyTorch's own there: of 16 bits, oneDNN copies their operands

# What holds workspace on a GPU, by the start of the operator's name: products, attention, convolutions, sums that
# blocks of threads make in parts, and sorts of places.
ON_A_GPU = (*LIBRARY, *PRODUCTS, "_efficient_attention", "_flash_attention", "native_layer_norm",
            "native_batch_norm", "_native_batch_norm", "native_group_norm", "_fused_rms_norm", "sum", "mean", "var", "std",
            "norm", "cumsum", "embedding_dense_backward", "index_put", "index_add", "scatter", "nll_loss", "_softmax",
            "_log_softmax", "argmax", "argmin", "max", "min", "amax", "amin", "all", "any", "isinf", "isfinite", "ldexp")
# Pointwise, but made of several kernels, with what the first make alive in between.
COMPOSED = ("deg2rad", "float_power", "isfinite", "isinf", "ldexp", "mvlgamma", "native_dropout_backward", "rad2deg", "rrelu")
ROOM = 0.5  # of the bytes that are free there

# Run on numbers from [0, 1): these go on until their numbers are small enough, or refuse zeros.
SPREAD = ("linalg_matrix_exp", "multinomial")
COUNT = ("nonzero", "unique", "_unique")  # how many results these make goes by the numbers they are run on

log = logging.getLogger("memopt_compile")

_known: dict[Any, int] = {}


def workspace(step: StepGraph, lowering: str = "eager") -> Workspace:
    """For each node of `step`, the bytes that it holds while it runs beyond its result. Of Inductor's it says as well what is
    `fused`.

    In a plan for ranks that are not there every operator is taken to need none.
    """
    if planned.active():
        return no_workspace

    seen: dict[fx.Node, tuple[tuple, int]] = {}  # what a call was, and what it held

    def held(node: fx.Node) -> int:
        call = (node.target, node.args, node.kwargs, *[n.meta.get("val") for n in node.all_input_nodes])
        known = seen.get(node)
        if known is None or not all(map(operator.is_, call, known[0])):
            if is_wait(node) or is_collective(node):  # what a wait holds is not in its own call
                return of_gloo(node)
            known = seen[node] = call, asked(node)
        return known[1]

    def asked(node: fx.Node) -> int:
        if _is_view(node.target):
            return 0
        operands = [n.meta.get("val") for n in node.all_input_nodes]
        if node.op != "call_function" or (lowering == "inductor" and not called_by_inductor(node.target, operands)):
            return 0
        if _only_writes(node.target, node.args, operands) and not _has_number(node.args):
            return 0
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: n.meta.get("val"))
        return _inside(step, node, held) or workspace_bytes(node.target, args, kwargs)

    if lowering == "inductor":
        held.fused = fused  # type: ignore[attr-defined]
    return held


def of_gloo(node: fx.Node) -> int:
    """Bytes that gloo holds from a collective until it has been waited for, and the wait itself: the
    whole result of a gather or operand of a scatter once more, and the number that a mean divides by. A
    bucket of gathers has its operands copied side by side as well.
    """
    launch = launch_of(node) if is_wait(node) else node
    if not is_collective(launch):
        return 0
    name, given = launch.target._schema.name, launch.args[0]
    several = isinstance(given, list | tuple)
    first = (given[0] if several else given).meta["val"]
    held = 0
    if "all_gather" in name or "reduce_scatter" in name:
        held = whole_bytes(launch)
    if several and "all_gather" in name:
        held += whole_bytes(launch) // launch.args[1]
    return held + (8 + first.element_size() if "avg" in launch.args else 0)


def _inside(step: StepGraph, node: fx.Node, held: Workspace) -> int:
    """Bytes that the largest body of `node` holds beyond the results."""
    bodies = [getattr(step.module, n.target, None) for n in node.all_input_nodes if n.op == "get_attr"]
    peaks = [max(live_bytes(b.graph.nodes, lifetimes(b.graph), held))
             for b in bodies if isinstance(b, fx.GraphModule)]
    return max(0, max(peaks, default=0) - nbytes(node.meta.get("val")))


def is_library(target: Any) -> bool:
    """Whether Inductor calls PyTorch's own kernel for this operator."""
    return isinstance(target, OPERATOR) and target.__name__.startswith(LIBRARY)


def called_by_inductor(target: Any, operands: Any) -> bool:
    """Whether Inductor calls a kernel for this that may hold workspace."""
    return is_library(target) or (isinstance(target, OPERATOR) and target.__name__.split(".")[0] in PRODUCTS and any(
        isinstance(t, Tensor) and t.dtype in (torch.bfloat16, torch.float16) for t in operands))


def workspace_bytes(target: Any, args: Any, kwargs: Any) -> int:
    """Bytes that ``target(*args, **kwargs)`` holds while it runs beyond its result.

    Tensors among the arguments may be fake: only their shapes, strides and dtypes count.
    """
    if not isinstance(target, OPERATOR) or target.namespace not in OF_TORCH:
        return 0  # a collective run here would wait for other ranks, and be taken for one of a step
    if _is_view(target):
        return 0
    tensors = _tensors((args, kwargs))
    if not tensors:
        return 0
    one_each = _only_writes(target, args, tensors)
    if one_each and not _has_number(args):
        return 0
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    if target.namespace != "memopt" and device.type != "cpu" and not _runs_on(device, target, tensors):
        return 0
    if target is IN_SLABS_:
        args = of_one_slab(*args)
    key = (target, device.type, _description((args, kwargs), one_each))
    if key not in _known:
        if profiler_active():
            _tell_of_profiler()
            return 0
        if one_each:
            args, kwargs = pytree.tree_map_only(Tensor, _one_element, (args, kwargs))
        _known[key] = _measure(target, args, kwargs, device)
    return _known[key]


def _runs_on(device: torch.device, target: Any, tensors: list[Tensor]) -> bool:
    """Whether a GPU may run `target` on made-up operands."""
    return (device.type == "cuda" and torch.cuda.is_available() and target.__name__.startswith(ON_A_GPU)
            and all(sizes := [hinted(t.numel()) * t.element_size() for t in tensors])
            and sum(sizes) <= ROOM * free_bytes(device))


@functools.cache
def _tell_of_profiler() -> None:
    log.warning("planned while a profiler records: the predicted peak leaves out what operators hold beyond their results. "
                "Call the step once before you profile it")


@functools.cache
def _is_view(target: Any) -> bool:
    aliases = [a.alias_info for a in target._schema.arguments
               if a.alias_info is not None] if isinstance(target, OPERATOR) else []
    return bool(aliases) and not any(a.is_write for a in aliases)


def _only_writes(target: Any, args: Any, operands: list[Any]) -> bool:
    """Whether `target` is one pointwise kernel and brings no operand to another dtype before it starts, scalars left out. Of
    integers and masks it may: a quotient is of real numbers, and beside a number a mask becomes one of integers."""
    if not isinstance(target, OPERATOR) or torch.Tag.pointwise not in target.tags or target._schema.name[6:].rstrip("_") in COMPOSED:
        return False
    dtypes = {t.dtype for t in operands if isinstance(t, Tensor) and t.dim()}
    return len(dtypes) <= 1 and all(d.is_floating_point or d.is_complex for d in dtypes)


def _has_number(args: Any) -> bool:
    return any(isinstance(a, int | float | complex | torch.SymInt | torch.SymFloat) for a in args)


def _one_element(tensor: Tensor) -> Tensor:
    return torch.empty([1] * tensor.dim(), dtype=tensor.dtype, device="meta")


def _tensors(value: Any) -> list[Tensor]:
    """The tensors among arguments. Plans ask for them so often that `pytree` took a tenth of their time."""
    if isinstance(value, list | tuple | dict):
        return [t for each in (value.values() if isinstance(value, dict) else value) for t in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def _description(value: Any, one_each: bool) -> Any:
    """What arguments have to have in common for calls to hold the same; with `one_each` each tensor as `_one_element`."""
    if isinstance(value, Tensor):
        one = (1,) * value.dim()
        return (value.dtype, *((one, one) if one_each else (
            tuple(map(hinted, value.shape)), tuple(map(hinted, value.stride())))))
    if isinstance(value, list | tuple):
        return tuple([_description(each, one_each) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _description(each, one_each)) for name, each in value.items()])
    return str(hinted(value))


def _keep_as_many_as_given(places: list[Any], values: Tensor) -> None:
    """Have a mask among `places` as many trues as there are values for it."""
    for at, mask in enumerate(places):
        if mask is not None and mask.dtype == torch.bool and values.dim() > at and values.shape[at] != 1:
            mask &= torch.arange(mask.numel(), device=mask.device).view(mask.shape) < values.shape[at]
            return


def _measure(target: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """Peak of one run on made-up operands, less the bytes of its results: on `device`, but of ours that are not compiled
    for it on a CPU."""
    compiled = target.__name__.startswith("compiled") and torch.get_device_module(device).is_available()
    there = None if compiled else "cpu" if target.namespace == "memopt" else device
    drawing = [] if there == "cpu" or device.type == "cpu" else [device]
    with real_tensors(), torch.random.fork_rng(devices=drawing), torch.no_grad(), few_slabs(device):
        args, kwargs = stand_ins((args, kwargs), there, random=target.__name__.startswith(SPREAD),
                                 apart=target.__name__.startswith(COUNT))
        run = partial(target, *args, **kwargs)
        try:
            if target.__name__.startswith("index_put"):
                _keep_as_many_as_given(*args[1:3])
            if target.__name__.startswith("ctc_loss"):
                ctc.longest(*[t for t in args if isinstance(t, Tensor)][-4:])
            run()  # libraries keep what they set up in their first call
            seen = measure(run, resident=[t for t in pytree.tree_leaves((args, kwargs)) if getattr(t, "is_cuda", False)])
        except Exception:  # made-up operands may be refused: then nothing is known of it
            return 0
    results = [t for t in pytree.tree_leaves(seen.result) if isinstance(t, Tensor) and t.layout is torch.strided]
    own = sum(t.numel() * t.element_size() for t in results)
    kept = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in results)}
    if own < sum(kept.values()):  # more than the result, of which the eager lowering makes a copy
        return max(seen.transient_peak_bytes - own, seen.end_bytes)
    return max(0, seen.transient_peak_bytes - seen.end_bytes)
