"""The private parts of Inductor that the Inductor lowering stands on.

Kept apart from `compat` because importing Inductor takes a second that only this lowering
needs to pay. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, maybe_warm_pool
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.inductor_prims import force_stride_order as STORE
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton

from .kernels import as_memopt_wants, writing_into
from .trace import float32_precision

__all__ = ["STORE", "Kernels", "compile_graph", "computed_again", "decompositions", "has_cpp_compiler", "has_triton",
           "joint_graph_passes", "settings", "store", "warm_up"]


def decompositions() -> dict[Any, Callable]:
    """The operators that Inductor wants taken apart before it sees a graph."""
    return dict(select_decomp_table())


def has_cpp_compiler() -> bool:
    """Whether Inductor's own search for a C++ compiler finds one."""
    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return False


def warm_up(devices: set[str]) -> None:
    """Begin, beside this thread, what the first kernel of a process has to wait for: on a CPU, trying the compiler on
    this processor's vector instructions, and the headers of every kernel; on a GPU the processes that compile for
    it, without which each kernel is compiled by this one."""
    if devices - {"cpu"}:
        maybe_warm_pool()
    if "cpu" not in devices:
        return
    kernel = ('#include <torch/csrc/inductor/cpp_prefix.h>\n'
              'extern "C" void kernel(const float* x) {}  // uses at::vec::\n')

    def compile_one() -> None:
        with contextlib.suppress(Exception):  # the first real kernel will say what is wrong
            CppPythonBindingsCodeCache.load_pybinding(["const float*"], kernel)

    threading.Thread(target=compile_one, daemon=True).start()


class Kernels:
    """C++ kernels of graphs that are lowered within `put_off`, for a compiler to begin with and to wait for.

    Inductor waits for the kernels of a graph before it lowers the next one. Here that is left to `finish`; until
    then no compiled graph may be called. A program that is only looked at needs none of them.
    """

    def __init__(self) -> None:
        self._later: list[_Kernel] = []
        self._waiting: list[tuple[Any, dict]] = []

    @contextlib.contextmanager
    def put_off(self, begin: bool = True) -> Iterator[None]:
        """With `begin` the C++ compiler works while this thread lowers more graphs, else it waits for `begin`."""
        thread, cpp, wait = threading.get_ident(), AsyncCompile.cpp_pybinding, AsyncCompile.wait

        def cpp_later(compiler: Any, *given: Any) -> Any:
            if begin or threading.get_ident() != thread or get_compile_threads() <= 1:
                return cpp(compiler, *given)
            self._later.append(_Kernel(lambda: AsyncCompile.cpp_pybinding(compiler, *given)))
            return self._later[-1]

        def wait_later(compiler: Any, scope: dict) -> None:
            if threading.get_ident() == thread:
                self._waiting.append((compiler, scope))
            else:
                wait(compiler, scope)

        AsyncCompile.cpp_pybinding, AsyncCompile.wait = cpp_later, wait_later
        try:
            yield
        finally:
            AsyncCompile.cpp_pybinding, AsyncCompile.wait = cpp, wait

    def begin(self) -> None:
        for kernel in self._later:
            kernel.begin()

    def finish(self) -> None:
        self.begin()
        while self._waiting:
            compiler, scope = self._waiting.pop(0)
            AsyncCompile.wait(compiler, scope)
        self._later.clear()


class _Kernel(CodeCacheFuture):
    """What `compile` gives, a future itself, from when it is first asked to begin."""

    def __init__(self, compile: Callable[[], Any]) -> None:
        self.begin = functools.cache(compile)

    def result(self, *given: Any, **more: Any) -> Any:
        return self.begin().result(*given, **more)


def joint_graph_passes(module: fx.GraphModule) -> fx.GraphModule:
    """Inductor's rewrites of a graph that is still ATen: patterns, constants, random numbers.

    What a pattern's replacement returns may lie otherwise in memory (an attention's result), which its readers have
    to be told."""
    values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    mode = _fake_mode(values)
    with V.set_fake_mode(mode), _no_guards_on_constants(mode.shape_env):
        takes_module = "gm" in inspect.signature(FakeTensorUpdater).parameters  # 2.13
        updater = FakeTensorUpdater(module if takes_module else module.graph)
        module = _recursive_joint_graph_passes(module)
        updater.incremental_update()
        return module


@contextlib.contextmanager
def _no_guards_on_constants(shapes: Any) -> Iterator[None]:
    """Undo what matching a pattern leaves in the step's guards.

    To try attention whose scores are divided by an integer, the matcher makes a symbol of it. It
    has no place among the inputs, and Dynamo then fails on the guard (torch 2.13, for any backend).
    """
    if shapes is None:
        yield
        return
    name = "backed_var_to_val" if hasattr(shapes, "backed_var_to_val") else "var_to_val"
    known, guards = set(getattr(shapes, name)), len(shapes.guards)
    yield
    made = set(getattr(shapes, name)) - known
    shapes.guards[guards:] = [g for g in shapes.guards[guards:] if not g.expr.free_symbols & made]


def turns_layouts(graph: fx.Graph) -> bool:
    """Whether Inductor is to turn what convolutions read to channels-last. On CPUs that is for oneDNN, which has none in float64."""
    values = [n.meta["val"] for n in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)]
    return config.layout_optimization and any(v.device.type != "cpu" or v.dtype != torch.float64 for v in values)


def compile_graph(module: fx.GraphModule, stores: bool = False, in_order: bool = False, as_traced: bool = False,
                  given: Sequence[int] = ()) -> tuple[Callable[[list], Any], str]:
    """The boxed callable that Inductor makes of `module`, and the wrapper's source.

    Every output keeps the strides of its fake value, because what reads it was compiled for
    them. CUDA graphs are off: a piece's inputs move from call to call. With `stores`, what is
    read several times is stored between, if it takes more than a few operators: see `computed_again`.

    Inductor puts each operator right before its first reader, unless the graph's order is to be kept (`in_order`), and turns what
    convolutions read to channels-last, unless it is to lie `as_traced`. Inputs of the numbers `given`, whose names have to be their own,
    may be written over.
    """
    values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    _spell_out_alpha(module)
    _products_apart(module)
    _copy_as_computed(module)
    _scalars_once(module)
    _layouts_as_traced(module)
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = [
        i for i, value in enumerate(output.args[0]) if isinstance(value, fx.Node)]
    # A context of its own: what Inductor notes in it belongs to this graph alone.
    realized = config.patch(realize_opcount_threshold=8) if stores else computed_again(module.graph)
    placed = config.patch(reorder_for_locality=config.reorder_for_locality and not in_order,
                          layout_optimization=not as_traced and turns_layouts(module.graph))
    with tracing(TracingContext(_fake_mode(values))), realized, placed, as_memopt_wants(), writing_into(given):
        compiled = compile_fx_inner(module, values, is_inference=True, cudagraphs=BoxedBool(False))
    return compiled, getattr(compiled, "source_code", "")


def store(node: fx.Node) -> fx.Node:
    """Have Inductor make a buffer of the result of `node` that its readers read, where it might compute it
    again for each; returns what stands for that. (A mark would not be in the key of Inductor's cache.)"""
    with node.graph.inserting_after(node):
        stored = node.graph.call_function(STORE, (node, list(node.meta["val"].stride())))
    stored.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    return stored


def _copy_as_computed(module: fx.GraphModule) -> None:
    """Copy into a view of an input in place of copying a view of the result.

    Inductor fuses loops over the same shape: one over the rows of a parameter is not fused with
    one over the blocks of its moments, and what both compute from them is then computed twice.
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
        into, source = node.args[:2]
        if into.op == "placeholder" and not node.users and source.target is aten.view.default:
            whole, value = source.args[0], into.meta["val"]
            shape = whole.meta["val"].shape
            if (value.is_contiguous() and whole.meta["val"].is_contiguous()
                    and value.shape == source.meta["val"].shape):
                with module.graph.inserting_before(node):
                    view = module.graph.call_function(aten.view.default, (into, list(shape)))
                view.meta["val"] = value.view(shape)
                node.args = (view, whole, *node.args[2:])
    module.recompile()


def _scalars_once(module: fx.GraphModule) -> None:
    """Store a 0-dim number that elementwise operators on the CPU read, unless the graph tells it.

    Inductor would compute it again for every few elements of them: the powers of an optimizer's
    bias correction take longer there than all else. `as_strided` makes it a buffer of its own; of
    a view it would forget the place.
    """
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        if not _on_cpu(node) or node.meta["val"].dim() or not isinstance(
                node.target, torch._ops.OpOverload) or node.target._schema.returns[0].alias_info:
            continue
        if node.target in (aten.full.default, aten.scalar_tensor.default) and not node.all_input_nodes:
            continue
        readers = [user for user in node.users if _on_cpu(user) and user.meta["val"].dim()]
        if readers:
            with module.graph.inserting_after(node):
                stored = module.graph.call_function(
                    torch.ops.aten.as_strided.default, (node, [], []))
            stored.meta["val"] = node.meta["val"]
            for reader in readers:
                reader.replace_input_with(node, stored)
    module.recompile()


def _layouts_as_traced(module: fx.GraphModule) -> None:
    """Hand convolutions what was copied into another layout in that layout.

    Inductor takes the ordinary one for a buffer that no other graph sees, save of images. Of one channel
    the strides fit both layouts, and PyTorch chooses the kernel by them: the same convolution would be
    computed by another one, and its result copied, depending on who else reads its operand.
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        value, layouts = node.meta["val"], (node.meta["val"].stride(), node.args[0].meta["val"].stride())
        # (A copy into the same layout may be taken out, and `as_strided` of a view is not to be trusted.)
        readers = [user for user in node.users
                   if user.target in (aten.convolution.default, aten.convolution_backward.default)]
        if readers and layouts[0] != layouts[1] and not value.is_contiguous():
            store(node)
        elif readers and layouts[0] != layouts[1]:
            with module.graph.inserting_after(node):
                same = module.graph.call_function(
                    aten.as_strided.default, (node, list(value.shape), list(layouts[0])))
            same.meta["val"] = value
            for reader in readers:
                reader.replace_input_with(node, same)
    module.recompile()


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def computed_again(graph: fx.Graph) -> contextlib.AbstractContextManager:
    """For a graph that makes bytes of numbers, or rounds their bits: Inductor stores nothing between, however long it is.

    To decode and encode a moment of 8 bits takes more operators than it computes twice. Three
    results it would store in float32 for the whole tensor, which is more memory than the
    states save, and takes longer than to compute them in both loops, over elements and blocks. And what CAME takes
    means of is in float32 twice a parameter in bfloat16, whose rounding would store it.
    """
    def value(node: fx.Node) -> Any:
        return node.meta.get("val", node.meta.get("example_value"))

    for node in graph.nodes:
        made = torch.int32 if node.target is torch.ops.aten.view.dtype else torch.uint8
        if getattr(value(node), "dtype", None) == made and any(
                isinstance(value(a), Tensor) and value(a).is_floating_point()
                for a in node.all_input_nodes):
            return config.patch(realize_opcount_threshold=2000, realize_reads_threshold=200)
    return contextlib.nullcontext()


def _spell_out_alpha(module: fx.GraphModule) -> None:
    """Multiply by ``alpha`` in an operator of its own.

    Inductor makes ``addmm`` of ``add(mm(a, b), c, alpha=0.01)`` and drops alpha without a word
    (seen on 2.11 and 2.13): in a whole step that is the weight decay of SGD.
    """
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs.get("alpha", 1) != 1:
            other, alpha = node.args[1], node.kwargs["alpha"]
            if not isinstance(other, fx.Node) or not isinstance(other.meta.get("val"), Tensor):
                continue
            with module.graph.inserting_before(node):
                scaled = module.graph.call_function(aten.mul.Tensor, (other, alpha))
            with _fake_mode([other.meta["val"]]):
                scaled.meta["val"] = aten.mul.Tensor(other.meta["val"], alpha)
            node.args, node.kwargs = (node.args[0], scaled), {}
    module.recompile()


def _products_apart(module: fx.GraphModule) -> None:
    """Add to a product what is computed for it in the loop that reads the sum.

    Inductor makes ``addmm`` of ``add(mm(a, b), c)``, and a buffer for ``c``: beside the gradient of a matrix
    its weight decay. On a GPU it leaves the two apart itself, if what reads them is pointwise.
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for product, other in (node.args[:2], node.args[1::-1]):
            if (isinstance(other, fx.Node) and getattr(product, "target", None) is aten.mm.default
                    and len(product.users) == 1 and torch.Tag.pointwise in getattr(other.target, "tags", ())
                    and other.meta["val"].shape == product.meta["val"].shape):
                store(product)


def _fake_mode(values: Sequence[Any]) -> Any:
    return detect_fake_mode(list(values)) or FakeTensorMode(allow_non_fake_inputs=True)


def settings() -> str:
    """All settings of the process that change the code that Inductor generates."""
    return repr((sorted(config.save_config_portable().items(), key=lambda item: item[0]),
                 torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
                 [float32_precision(device, kind) for device in ("cpu", "cuda") for kind in ("matmul", "conv")],
                 torch.backends.mkldnn.enabled))
