"""Private torch parts around tracing and reports: what is traced whole, the structured log, the
profiler's state, Dynamo's first frame, ranks and tensors that are not there.

Beside `compat`, which is about capture. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import convert_frame
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch._aot_autograd import graph_compile
from torch._guards import tracing
from torch._inductor import config as inductor_config
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    PythonFunctionalizeAPI,
    dispatch_functionalize,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree  # noqa: F401  (for `costs` and `verification`)
from torch.utils._python_dispatch import _disable_current_modes

from .sizes import largest

# What an ``assert`` on a tensor is traced as.
CHECKS = (torch._assert_async, torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)


def float32_precision(device_type: str, kind: str) -> str:
    """What the float32 operands of a "matmul" or a "conv" are rounded to on the type of device: "ieee" if they are not,
    "tf32" or "bf16".

    Of the names of torch 2.9, which see what was set by either API: of those before it, such as
    `torch.get_float32_matmul_precision`, some raise once a name of 2.9 was set.
    """
    backends = torch.backends
    libraries = ({"matmul": backends.cuda.matmul, "conv": backends.cudnn.conv} if device_type == "cuda" else
                 {"matmul": backends.mkldnn.matmul, "conv": backends.mkldnn.conv})
    found = libraries[kind].fp32_precision
    return "ieee" if found == "none" else found


def artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into the structured log (`TORCH_TRACE`, tlparse); `text` runs only if it is on."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def backend_named(name: str) -> Callable[..., Callable[..., object]]:
    """The backend that `torch.compile(backend=name)` uses."""
    return lookup_backend(name)


def hinted(size: Any) -> Any:
    """A number of bytes as a plain int: of a symbolic one its value in this compilation, and of one of which only
    the data tell the largest that it can have.

    Read without a guard, since a report must not make the step recompile. None stays None.
    """
    if not isinstance(size, torch.SymInt | torch.SymFloat):
        return size
    if size.node.has_hint():
        return int(size.node.hint)
    return largest(size) if isinstance(size, torch.SymInt) else 1


def profiler_active() -> bool:
    """Whether a profiler is recording: starting a second one would end the first, and on another thread the process."""
    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


@contextlib.contextmanager
def raising_after_first_frame(signal: BaseException) -> Iterator[None]:
    """Raise `signal` once Dynamo is done with the first frame it meets, before anything of it runs.

    Also where Dynamo skips the frame or fails on it, since the frame would then run in eager. For
    a failure that Dynamo reports to the user, `signal` has it as its cause. `signal` should be no
    `Exception`: Dynamo may answer one of those by running the frame.
    """
    original = convert_frame.CatchErrorsWrapper.__call__

    def convert(self: object, *args: object, **kwargs: object) -> object:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            raise signal from error
        raise signal

    with mock.patch.object(convert_frame.CatchErrorsWrapper, "__call__", convert):
        yield


def no_donated_buffers() -> Any:
    """Compile a backward that may run again (`retain_graph`, `create_graph`): AOTAutograd refuses that one which
    may write into what its forward saved."""
    return mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *args: [])


@contextlib.contextmanager
def for_the_eager_lowering() -> Iterator[None]:
    """Trace interpolation as the one operator that eager runs, and random numbers that nobody reads too: without
    these all later ones would be others, and FX lets them go where Inductor draws by itself.

    torch has every such operator split, above autograd, into gathers and arithmetic with an
    intermediate each, which Inductor fuses again and the eager lowering would hold.
    """
    split = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(fallback_random=True))
        for name in dir(torch.ops.aten):
            if not name.startswith(("upsample", "_upsample")):
                continue
            packet = getattr(torch.ops.aten, name)
            for overload in (getattr(packet, o) for o in packet.overloads()):
                stack.callback(overload._dispatch_cache.clear)
                stack.enter_context(mock.patch.object(overload, "py_kernels", {
                    k: f for k, f in overload.py_kernels.items() if k not in split}))
                overload._dispatch_cache.clear()
        yield


# A function without writes: what it writes in place becomes values.
functionalized = dispatch_functionalize


def traced_as_compiled(function: Callable, examples: Callable[[], list], decompositions: dict) -> fx.GraphModule:
    """The graph of `function`, which is told that it is being compiled, of fake `examples`."""
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True), torch.no_grad():
        with fake_tensors():
            given = examples()
        return make_fx(function, decomposition_table=decompositions)(*given)


def traced_functionally(function: Callable, given: list, decompositions: Mapping) -> fx.Graph:
    """The graph of `function` of these fake tensors, as AOTAutograd has it: without writes."""
    with given[0].fake_mode, torch.no_grad():
        return make_fx(dispatch_functionalize(function), decomposition_table=dict(decompositions))(*given).graph


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether it is one of those with which AOTAutograd turns writes into values."""
    return isinstance(tensor, FunctionalTensor)


def replace_functional(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a functional tensor the value of another, as an operator in place does."""
    api = PythonFunctionalizeAPI()
    api.replace(tensor, api.unwrap_tensors(value))
    api.commit_update(tensor)
    api.sync(tensor)


def let_batch_vary(tensor: torch.Tensor) -> None:
    """Have the first dimension traced as a symbol, unless the code wants it to be a number."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """A scope in which tensors are real although torch is tracing with fake ones, and what runs does as it
    will behind the trace: torch 2.13 says that it is compiling for as long as a backend does."""
    with tracing(None), _disable_current_modes(), mock.patch.object(torch.compiler, "_is_compiling_flag", False):
        yield


def dispatched_by_cpp() -> Any:
    """A scope in which operators go to their kernels without holding Python's lock, as they do outside of a
    compilation.

    AOTAutograd has Python asked about each operator, and the lock stays taken below. A collective then waits
    for a mutex of gloo's, while gloo's thread, which has it, waits for Python's lock to let tensors go:
    about one compilation in some hundred did not go on.
    """
    return no_python_dispatcher()


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """A scope in which new tensors have shapes and no bytes, and modules can be converted (`model.bfloat16()`)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo, swap = mode.fake_tensor_converter.meta_converter.tensor_memo, torch.utils.swap_tensors

    def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
        memo.clear()  # it refers weakly to tensors that the mode has made, and PyTorch swaps none that is referred to
        swap(a, b)

    with mode, mock.patch.object(torch.utils, "swap_tensors", swap_tensors):
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def start_fake_group(count: int) -> None:
    """A default process group of `count` ranks that sends nothing, with this process as the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())


def default_store() -> Any:
    """The key-value store by which the ranks of this process's group have found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


class GraphOnly(fx.GraphModule):
    """A graph with its constants, never called: writing and compiling code for one takes as long as a pass."""

    def recompile(self) -> Any:
        return None
