"""Every private torch name the project touches, in one place.

PyTorch keeps whole-step capture behind private modules, so this file is the only
one that has to change when torch does. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.exc import (
    AutogradGradRestartAnalysis,
    BackendCompilerFailed,
    TorchRuntimeError,
    Unsupported,
)
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable, UserDefinedVariable
from torch._functorch import aot_autograd
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.transformer import _detect_is_causal_mask as detect_is_causal_mask
from torch.optim._adafactor import _single_tensor_adafactor as single_tensor_adafactor
from torch.optim.adam import _single_tensor_adam as single_tensor_adam
from torch.optim.asgd import _single_tensor_asgd as single_tensor_asgd
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.optim.radam import _single_tensor_radam as single_tensor_radam
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "AutogradGradRestartAnalysis", "BackendCompilerFailed", "BaseListVariable", "FakeTensor",
    "FakeTensorMode", "LazyVariableTracker", "OptimizerVariable", "TensorVariable",
    "TorchRuntimeError", "TracingContext", "Unsupported", "UserDefinedObjectVariable", "UserDefinedVariable", "UserFunctionVariable",
    "UserMethodVariable",
    "VariableBuilder", "VariableTracker", "aot_module_simplified",
    "detect_fake_mode", "detect_is_causal_mask", "input_descriptor_index", "output_targets",
    "single_tensor_adafactor", "single_tensor_adam", "single_tensor_asgd", "single_tensor_radam",
    "source_name", "tensor_variables", "tracing",
]


# Around the update of every optimizer of torch's.
UPDATE_WRAPPER = _use_grad_for_differentiable(lambda self: None).__code__
# Around that of each class of which there has been an optimizer: `super().step()` meets it then.
HOOKS_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def source_name(source: Any) -> str:
    """A Dynamo source as Python text, such as ``L['self'].opt.state``; ``""`` without one."""
    if source is None:
        return ""
    name = source.name
    return name() if callable(name) else name


def tensor_variables(output: Any) -> dict[int, Any]:
    """Dynamo's tensor variables by the ``id`` of their fake value."""
    found: dict[int, Any] = {}
    known = [*output.input_source_to_var.values(), *output.side_effects.id_to_variable.values()]
    known += output.leaf_var_creation_order if hasattr(output, "leaf_var_creation_order") else []
    for variable in known:
        if isinstance(variable, LazyVariableTracker):
            if not variable.is_realized():
                continue
            variable = variable.realize()
        if isinstance(variable, TensorVariable):
            found.setdefault(id(fake_value(variable)), variable)
    return found


def fake_value(variable: Any) -> Any:
    """The fake tensor that stands for a Dynamo tensor variable."""
    return variable.as_proxy().node.meta.get("example_value")


def pending_gradient(tx: Any, real_parameter: torch.Tensor) -> bool:
    """Whether ``parameter.grad`` holds a tensor at this point of the trace."""
    variable = tx.output.side_effects.id_to_variable.get(id(real_parameter))
    if variable is not None:
        if isinstance(variable, LazyVariableTracker):
            variable = variable.realize()
        if tx.output.side_effects.has_pending_mutation_of_attr(variable, "grad"):
            value = tx.output.side_effects.load_attr(variable, "grad")
            return isinstance(value.realize(), TensorVariable)
    return real_parameter.grad is not None


def gradient(tx: Any, variable: Any) -> Any:
    """``.grad`` of a tensor variable at this point of the trace. (What is pending 2.11 keeps for itself.)"""
    effects = tx.output.side_effects
    pending = effects.has_pending_mutation_of_attr(variable, "grad")
    return effects.load_attr(variable, "grad") if pending else variable.var_getattr(tx, "grad")


def replaced_gradients(output: Any) -> dict[str, Any]:
    """Leaves whose ``.grad`` the traced frame sets, by the source of the leaf."""
    found = {}
    for variable, attributes in output.side_effects.store_attr_mutations.items():
        if isinstance(variable, TensorVariable) and "grad" in attributes:
            if variable.source is not None:
                found[source_name(variable.source)] = attributes["grad"]
    return found


def input_descriptor_index(node: torch.fx.Node) -> int | None:
    """Position of an ATen input among the inputs of the Dynamo graph, if it is one of them, or one of the
    tensors inside of one that is a subclass (a DTensor is traced as its local tensor and its mesh)."""
    description = node.meta.get("desc")
    while hasattr(description, "base"):
        description = description.base
    return getattr(description, "idx", None)


def output_targets(graph: torch.fx.Graph) -> list[Any]:
    """AOTAutograd's description of each output (``None`` where it gives none)."""
    node = graph.output_node()
    return list(node.meta.get("desc") or [None] * len(node.args[0]))


def list_variable(items: list[Any]) -> Any:
    from torch._dynamo.variables.lists import ListVariable

    return ListVariable(items)


def tuple_variable(items: list[Any]) -> Any:
    from torch._dynamo.variables.lists import TupleVariable

    return TupleVariable(items)


def dict_variable(tx: Any, items: dict[str, Any]) -> Any:
    from torch._dynamo.variables.dicts import ConstDictVariable

    return ConstDictVariable({VariableTracker.build(tx, k): v for k, v in items.items()}, dict)


def map_tensors(tx: Any, result: Any, function: Callable[[Any], Any]) -> Any:
    """`function` over the tensors of a tuple of results, ``None`` left alone."""
    if isinstance(result, TensorVariable):
        return function(result)
    if not isinstance(result, BaseListVariable):
        return result
    return tuple_variable([map_tensors(tx, item, function) for item in result.items])


def object_behind(variable: Any) -> Any:
    """The user's own object behind a variable (a module, an optimizer), None without one."""
    return getattr(variable.realize(), "value", None)


def real_value(tx: Any, variable: Any) -> Any:
    """The user's own tensor behind an input variable, or None for one made in the step."""
    grapharg = variable.as_proxy().node.meta.get("grapharg")
    return None if grapharg is None else grapharg.example


@contextlib.contextmanager
def traced_without_grad(tx: Any) -> Iterator[None]:
    from torch._dynamo.variables.ctx_manager import GradModeVariable

    mode = GradModeVariable.create(tx, False, initialized=True)
    mode.enter(tx)
    try:
        yield
    finally:
        mode.exit(tx)


def global_optimizer_hooks() -> bool:
    """Whether any hook is registered for all optimizers of the process, but those that only check."""
    from torch.optim import optimizer

    hooks = (*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values())
    return any(not getattr(hook, "only_checks", False) for hook in hooks)


def attribute_source(variable: Any, name: str) -> Any:
    """Where Dynamo finds ``variable.name`` again when a graph ends before it is used up."""
    from torch._dynamo.source import AttrSource

    return AttrSource(variable.source, name) if variable.source else None


def changes(builder: Any, value: float) -> bool:
    """Whether Dynamo has seen another value of this number before (and counts this one)."""
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, process_automatic_dynamic

    entry = process_automatic_dynamic(
        builder.tx, source_name(builder.source), FrameStateSizeEntry.make_scalar(value))
    return entry.scalar is auto_dynamic


class NumberVariable(TensorVariable):
    """A number of the user's as a tensor. Of a type of its own, since Dynamo takes two plain tensor
    variables for one whose Python objects are the same, and two 0.1 often are."""

    def dynamic_getattr(self, tx: Any, name: str) -> Any:
        """A tensor's method, for which Dynamo would look in the user's number."""
        return GetAttrVariable(self, name)


def number_input(builder: Any, value: float) -> Any:
    """A Python float of the user as a 0-dim float64 graph input.

    Dynamo's own way makes the same tensor, then a symbolic float of it, which it specializes
    to a constant wherever an operator wants a plain number.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.builder import GraphArg, wrap_fx_proxy_cls

    known, source = builder.tx.output.unspec_variable_map, builder.get_source()
    if builder.name not in known:
        install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
        tensor = torch.tensor(value, dtype=torch.float64)
        # Made without a source: with one, the fake tensor would bring a symbolic float along.
        fake = builder.tx.fake_mode.from_tensor(tensor, static_shapes=True)
        proxy = builder.tx.output.root_tracer.create_graph_input(
            re.sub(r"[^a-zA-Z0-9]+", "_", builder.name), type(tensor), fake, source=source)
        known[builder.name] = wrap_fx_proxy_cls(
            NumberVariable, tx=builder.tx, proxy=proxy, example_value=fake, subclass_type=None)
        proxy.node.meta["grapharg"] = GraphArg(
            source, tensor, pass_arg_as_tensor=True, fake_tensor=fake, is_tensor=False,
            example_strong_ref=tensor)
    return known[builder.name]


def guard_value(source: Any, holds: Callable[[Any], bool], text: str) -> None:
    """Recompile once ``holds(value of source)`` is false."""
    from torch._dynamo.guards import install_guard

    def add_guard(builder: Any, guard: Any) -> None:
        manager = builder.get_guard_manager(guard)
        try:
            manager.add_lambda_guard(holds, [text])
        except TypeError:  # torch 2.13 also takes the user's stack
            manager.add_lambda_guard(holds, [text], None)

    install_guard(source.make_guard(add_guard))


def constant_value(variable: Any) -> tuple[bool, Any]:
    """(whether Dynamo holds the variable constant, its value)."""
    if variable.is_python_constant():
        return True, variable.as_python_constant()
    return False, None


def aot_module_simplified(gm: torch.fx.GraphModule, example_inputs: Any, **compilers: Any) -> Any:
    """AOTAutograd with compilers that Dynamo leaves alone.

    The compiler of a backward is called by ``backward()``, where frames may still be traced.
    """
    for name in ("fw_compiler", "bw_compiler", "inference_compiler"):
        if compilers.get(name) is not None:
            compilers[name] = torch.compiler.disable(compilers[name])
    # Its own rematerialization refuses random numbers and several backwards; ours takes the marks.
    with torch._functorch.config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False):
        return aot_autograd.aot_module_simplified(gm, example_inputs, **compilers)


def compile_with_inductor(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable:
    """`torch.compile`'s own way, for graphs without a backward of their own."""
    from torch._inductor.compile_fx import compile_fx

    from .inductor import computed_again

    with computed_again(gm.graph):
        return compile_fx(gm, example_inputs)


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def with_optimized_original(function: Any) -> Any:
    """The user's own function behind a `torch.compile` result (a function, method or module)."""
    if isinstance(function, torch.nn.Module):
        function = getattr(function, "_orig_mod", function).forward
    function = undisabled(function)
    return getattr(function, "__func__", function)


_TORCH = os.path.join(torch.__path__[0], "")


def undecorated(function: Any) -> Any:
    """The user's function below torch's decorators, such as `torch.no_grad()` or `torch.autocast`."""
    while hasattr(function, "__wrapped__") and hasattr(function, "__code__") and function.__code__.co_filename.startswith(_TORCH):
        function = with_optimized_original(function.__wrapped__)
    return function


def undisabled(function: Callable) -> Callable:
    """The function below a `torch.compile` or `torch.compiler.disable` around it."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def node_of(variable: Any) -> Any:
    """The graph node behind a tensor variable, None for anything else."""
    variable = variable.realize()
    return variable.as_proxy().node if isinstance(variable, TensorVariable) else None


def settle_unused_floats(gm: torch.fx.GraphModule) -> None:
    """Tell torch that the symbolic floats of this graph are used by nothing in it.

    Dynamo makes one for every 0-dim float tensor it meets (each optimizer's step count), and
    AOTAutograd traces the whole step a second time to get rid of them, unless told before.
    """
    used = set()
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat):
            used |= value.node.expr.free_symbols
    fake_mode = next((node.meta["example_value"].fake_mode for node in gm.graph.nodes
                      if isinstance(node.meta.get("example_value"), FakeTensor)), None)
    if fake_mode is None or fake_mode.shape_env is None:
        return
    shape_env = fake_mode.shape_env
    known = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    for symbol in getattr(shape_env, known):
        if symbol_is_type(symbol, SymT.FLOAT) and symbol not in used:
            TensorifyState.specialize(str(symbol))


def is_func_grad(node: torch.fx.Node) -> bool:
    """Whether a Dynamo node opens a level of `torch.func` differentiation."""
    return getattr(node.target, "__name__", "") == "_grad_increment_nesting"


def loss_decompositions() -> dict[Any, Callable]:
    """The mean losses whose CPU kernels return a number in the storage of all its terms, which
    then live as long as the loss, as their plain arithmetic."""
    from torch._decomp import get_decompositions

    return get_decompositions([torch.ops.aten.mse_loss, torch.ops.aten.binary_cross_entropy,
                               torch.ops.aten.soft_margin_loss, torch.ops.aten.smooth_l1_loss])


@functools.cache
def keep_placements(marker: Any) -> None:
    """Let DTensors go through an operator of one operand: every rank runs it on its own part.

    torch's public way (`register_sharding`) replicates what has fewer rows than there are ranks.
    """
    from torch.distributed.tensor._ops._tensor_ops import propagate_single_input_strategy
    from torch.distributed.tensor._ops.utils import register_op_strategy

    register_op_strategy(marker)(propagate_single_input_strategy)
