"""Where capture takes a hand in Dynamo: the methods that it replaces while it traces a frame.

Beside `compat`, which reads and makes Dynamo's values. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._decomp import decompositions
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards as torch_guards
from torch._dynamo import output_graph
from torch._dynamo.symbolic_convert import (
    InstructionTranslator,
    InstructionTranslatorBase,
    TensorifyState,
    compare_op_handlers,
)
from torch._dynamo.variables import builtin
from torch._dynamo.variables import torch as torch_variables
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lists import BaseListVariable, ListIteratorVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable, NumpyVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch._aot_autograd import graph_compile

from . import (
    FakeTensor,
    NumberVariable,
    branches,
    constants,
    decided,
    each,
    fake_value,
    guards,
    hooks,
    items,
    lists,
    numbers,
    python,
    schedulers,
    shared,
    source_name,
    texts,
    used_up,
)

COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
               ">": operator.gt, ">=": operator.ge}

SetAttr = getattr(builtin, "SetAttrBuiltinVariable", None)  # 2.13

IN_PLACE = frozenset({operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
                      operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior,
                      operator.ixor, operator.ilshift, operator.irshift})

RECURRENT = (torch.rnn_tanh, torch.rnn_relu, torch.gru, torch.lstm)


def _itself(leaf: Any, result: Any) -> Any:
    """What an operation in place on a parameter returns: the parameter. Dynamo makes another value of it,
    and ``p -= x; p.grad = None`` then leaves the parameter its gradient, which adds up silently. The same of
    what becomes a leaf: ``d = torch.empty_like(x).uniform_().requires_grad_()`` would have no `d.grad`."""
    leaf = leaf and leaf.realize()
    if isinstance(leaf, TensorVariable) and isinstance(result, TensorVariable) and not isinstance(
            leaf, NumpyNdarrayVariable):
        value = fake_value(leaf)
        if value is fake_value(result) and (leaf.source or not value._is_view()) and value.is_leaf and (
                value.requires_grad == bool(leaf.source)):
            return leaf
    return result


def _is_there(tensor: Any, name: Any, value: Any) -> bool:
    """Whether ``tensor.data = value`` changes nothing, as behind ``tensor.data -= x``: AOTAutograd refuses
    to set a tensor that the graph also writes to."""
    tensor, value = tensor.realize(), value.realize()
    if not (isinstance(tensor, TensorVariable) and isinstance(value, TensorVariable)
            and name.as_python_constant() == "data"):
        return False
    old, new = (fake_value(each) for each in (tensor, value))
    return old.untyped_storage()._cdata == new.untyped_storage()._cdata and all(
        getattr(old, part)() == getattr(new, part)() for part in ("size", "stride", "storage_offset"))


def _tracked(original: Callable, self: Any, value: Any) -> Any:
    """`VariableBuilder._wrap`, with an optimizer as an object that may change: Dynamo forgets what is written to one
    (``self.steps += 1``), without a word."""
    result = shared.wrap(functools.partial(lists.wrap_any, original), self, value)
    result = schedulers.is_known(self.tx.output, value, result)
    if type(result) is OptimizerVariable and value not in self.tx.output.side_effects:
        return self.tx.output.side_effects.track_object_existing(value, result)
    return result


def _asks_for_gradients(tensor: Any, name: Any, value: Any) -> bool:
    """Whether this is ``tensor.requires_grad = value``: Dynamo knows the method only, and that for a value as it is."""
    return (isinstance(tensor.realize(), TensorVariable) and name.as_python_constant() == "requires_grad"
            and value.is_python_constant())


def _makes_a_leaf(kwargs: dict[str, Any]) -> bool:
    """Whether the call of a function is ``torch.zeros(n, requires_grad=True)`` or one like it, which Dynamo refuses."""
    asked = kwargs.get("requires_grad")
    return asked is not None and asked.is_python_constant() and asked.as_python_constant() is True


def _sources_of_subclasses(original: Callable, var: Any) -> Any:
    """torch 2.11 insists on plain fake tensors among what is differentiated; DTensors are as good."""
    if isinstance(var, TensorVariable) and not isinstance(fake_value(var), FakeTensor):
        return [(fake_value(var), source_name(var.source) or None)]
    return original(var)


def tensors_in(given: Any) -> list[Any]:
    """The tensor variables in ``given``: itself, or those of a list or tuple."""
    given = given.realize()
    realized = (v.realize() for v in (given.items if isinstance(given, BaseListVariable) else [given]))
    return [v for v in realized if isinstance(v, TensorVariable)]


def is_none(given: Any) -> bool:
    """Whether an argument is None, or not given."""
    return given is None or isinstance(given.realize(), ConstantVariable) and given.realize().value is None


def sequence(tx: Any, given: Any) -> Any:
    """A tensor variable, a list or a tuple as it is; what else has tensors in it as a tuple."""
    given = given.realize()
    if isinstance(given, (TensorVariable, BaseListVariable)):
        return given
    return VariableTracker.build(tx, tuple).call_function(tx, [given], {})


@contextlib.contextmanager
def tracing_scope(
    *,
    method_backward: Callable,
    optimizer_getattr: Callable,
    validate_outputs: Callable,
    wrap_symfloat: Callable,
    autograd_grad: Callable,
    call_function: Callable,
    call_logger: Callable,
    call_skipped: Callable,
    call_recurrent: Callable,
    forms: dict[Callable, Callable],
    add_product: Callable,
    compare: Callable,
    log_graph_break: Callable,
    next_item: Callable,
    reads: Callable[[Any, Any], bool],
    behind: Callable[[Any], None],
    checks: Callable[[Any], bool],
    checked: Callable[[Any], None],
) -> Iterator[None]:
    """Dynamo as whole-step capture needs it, for the frames traced inside only.

    Each argument takes the place of the Dynamo method of that name and is called with the
    original method first; but `forms` are functions that are traced in place of torch's own, and `reads`
    says whether ``tensor.item()`` becomes a number that the trace does not know; `behind` ends the graph behind the step;
    `checks` says whether the graph may check data where a branch raises, and `checked` is told of each.
    """

    @contextlib.contextmanager
    def replaced(cls: type, name: str, new: Callable) -> Iterator[None]:
        original = cls.__dict__[name]  # by then: where two replace one, the later calls the earlier

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return new(original, self, *args, **kwargs)

        with mock.patch.object(cls, name, method):
            yield

    def tensor_getattr(original: Callable, self: Any, tx: Any, name: str) -> Any:
        # torch 2.13 writes a source onto what it finds here, also when that is the shared
        # constant None (`p.grad` after it was set to None): a later frame of the process
        # then "finds" its own None in this frame's locals. And onto what the frame has put there, which
        # would then be read from there at its end, where it has not been put yet.
        effects = tx.output.side_effects
        put = name == "grad" and effects.has_pending_mutation_of_attr(self, name)
        source = effects.load_attr(self, name).source if put else None
        result = original(self, tx, name)
        if put or isinstance(result, ConstantVariable) and result is ConstantVariable.create(result.value):
            result.source = source
        return result

    def call_builtin(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = self.as_python_constant()
        if function is delattr and isinstance(args[0].realize(), TensorVariable):
            if args[1].as_python_constant() == "grad":  # Dynamo would leave it there; eager has None then
                return VariableTracker.build(tx, setattr).call_function(
                    tx, [*args, ConstantVariable.create(None)], kwargs)
        if function is setattr and len(args) == 3 and _is_there(*args):
            return ConstantVariable.create(None)
        if function is setattr and len(args) == 3 and _asks_for_gradients(*args):
            args[0].realize().call_method(tx, "requires_grad_", [args[2]], {})
            return ConstantVariable.create(None)
        if function is format and len(args) == 2 and numbers.is_number(args[0]):
            return texts.text_of(args[0].realize(), args[1])
        if function is operator.mod and (text := texts.percent_of(*args)):
            return text
        if function is operator.iadd and lists.is_unread(args[0]):  # torch 2.11 has no method of its own for it
            args[0].call_method(tx, "extend", [args[1]], {})
            return args[0]
        args = texts.read_by(function, decided.of_items(tx, function, args))
        decided.refuse_zero(tx, function, args)
        if result := constants.chosen(tx, function, args) or decided.computed(tx, function, args) or numbers.computed(tx, function, args) or lists.read(tx, function, args):
            return result
        result = original(self, tx, args, kwargs)
        return _itself(args[0], result) if function in IN_PLACE else result

    def call_tensor_method(original: Callable, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "detach_" and not (fake_value(self).requires_grad or fake_value(self)._is_view()):
            return self  # ``p.grad.detach_()`` of older code; Dynamo refuses it of what its caller has
        if result := numbers.drawn(tx, self, name, args, kwargs):
            return result
        name, args, kwargs = numbers.with_tensors(tx, self, name, args, kwargs)
        if name == "add" and isinstance(alpha := kwargs.get("alpha"), TensorVariable):
            return numbers.sum_scaled(tx, self, *args, alpha)  # weight decay, Nesterov's momentum
        if (number := constants.read(self, name)) is not None:
            return VariableTracker.build(tx, number)
        if name == "item" and (tensor := branches.item(tx, self)):
            return tensor
        if name == "item" and reads(tx, self):
            with dynamo_config.patch(capture_scalar_outputs=True), \
                    mock.patch.object(tx.fake_mode, "allow_scalar_outputs", True):
                number = original(self, tx, name, args, kwargs)
            branches.note_version(self, number)
            return number
        result = original(self, tx, name, args, kwargs)
        return _itself(self, result) if name.endswith("_") else result

    def call_torch(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is not torch.nn.Parameter and _makes_a_leaf(kwargs):
            rest = {name: value for name, value in kwargs.items() if name != "requires_grad"}
            return call_torch(original, self, tx, args, rest).call_method(tx, "requires_grad_", [], {})
        args = lists.without_deques(self.value, args)
        result = (branches.asked(tx, self.value, args) or decided.computed(tx, self.value, args)
                  or each.taken_apart(tx, self.value, args, kwargs)
                  or numbers.called_as_method(tx, self.value, args, kwargs) or original(self, tx, args, kwargs))
        for operand in (*args[:1], kwargs.get("out")):
            result = _itself(operand, result)
        return result

    def call_numpy(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return branches.asked(tx, self.value, args) or original(self, tx, args, kwargs)

    def remove_specialized(original: Callable, self: Any) -> None:
        # torch 2.13 means to remove inputs here, but takes every node on a 0-dim tensor that
        # nobody reads for one: so also the in-place updates of a scalar parameter's state.
        hidden = {node: node.meta.pop("example_value") for node in self.graph.nodes
                  if node.op != "placeholder" and "example_value" in node.meta}
        original(self)
        for node, value in hidden.items():
            node.meta["example_value"] = value

    handlers = TorchInGraphFunctionVariable._get_handlers()
    original_grad = handlers[torch.autograd.grad]

    def differentiate(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        # A derivative may count by itself what a mask keeps (that of ``h[mask] = vector``); no gradient has such a size.
        # On a GPU autograd does so in a thread of its own, where `ignore_fresh_unbacked_symbols` of this one says nothing.
        # That one, inside, would note what is answered here as what was before, and leave it so for good (torch 2.11).
        with mock.patch.multiple(tx.fake_mode.shape_env, _ignore_fresh_unbacked_symbols_tls=lambda: True,
                                 _ignore_fresh_unbacked_symbols_set=lambda ignored: True):
            return original_grad(self, tx, *args, **kwargs)

    def handle_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        return autograd_grad(differentiate, self, *args, **kwargs)

    original_is_tensor = handlers[torch.is_tensor]

    def handle_is_tensor(self: Any, tx: Any, value: Any) -> Any:
        if isinstance(value.realize(), NumberVariable):
            return ConstantVariable.create(False)  # the user's is none
        return original_is_tensor(self, tx, value)

    def traced(form: Callable) -> Callable:
        return lambda self, tx, *args, **kwargs: UserFunctionVariable(form).call_function(tx, list(args), kwargs)

    def collect_inputs(original: Callable, self: Any, given: Any, error_on_non_leaf: bool = False) -> Any:
        # A leaf that the trace makes (by `requires_grad_()`) torch 2.13 differentiates, but refuses where it is named.
        given = list(given)
        found = original(self, given)
        return found if len(found) == len(given) else original(self, given, error_on_non_leaf)

    def check_leaves(original: Callable, self: Any, outputs: Any, tx: Any) -> None:
        # What is used up the backend detaches.
        original(self, [v for v in outputs if not (isinstance(v, TensorVariable) and used_up.used_up(self, fake_value(v)))], tx)

    types_known = lists.table_of_types()
    check = "_check_requires_grad_intermediate_outputs"  # 2.13's
    collect = torch_variables._collect_tensors_with_sources
    patches = (
        mock.patch.object(torch_variables, "_collect_tensors_with_sources",
                          functools.partial(_sources_of_subclasses, collect)),
        dynamo_config.patch(trace_autograd_ops=True, allow_rnn=True,
                            skip_nnmodule_hook_guards=False,  # a hook that a module gets later has to be noticed
                            use_numpy_random_stream=True,  # a graph would draw torch's numbers in place of NumPy's
                            capture_dynamic_output_shape_ops=True,  # or not: `compat.breaks.restart_without_data_sizes`
                            allow_unspec_int_on_nn_module=True,  # a counter there is no constant, once it has changed
                            # Which parameters are one, the model's and the optimizer's too, is guarded: a step whose
                            # weights were tied or replaced since is another step.
                            skip_no_tensor_aliasing_guards_on_parameters=False),
        mock.patch.object(lists, "behind_the_step", behind),
        mock.patch.object(torch_guards, "is_from_optimizer_source", lambda source: False),
        mock.patch.object(torch_guards, "match_on_id_for_tensor", functools.partial(
            guards.is_the_same_tensor, torch_guards.match_on_id_for_tensor)),
        branches.patches(checks, checked), *python.patches(), *decided.patches(), *shared.patches(),
        # In float32 on a CPU torch would trace its inference kernel, whose backward ends the process.
        mock.patch.object(decompositions, "select_one_layer_lstm_function",
                          lambda *args: decompositions.one_layer_lstm),
        replaced(TensorVariable, "method_backward", method_backward),
        replaced(TensorVariable, "_collect_backward_inputs", collect_inputs),
        replaced(TensorVariable, "var_getattr", tensor_getattr),
        replaced(TensorVariable, "call_method", call_tensor_method),
        replaced(builtin.BuiltinVariable, "call_function", call_builtin),
        *([replaced(SetAttr, "call_function", call_builtin)] if SetAttr else []),
        replaced(TorchInGraphFunctionVariable, "call_function", call_torch),
        replaced(NumpyVariable, "call_function", call_numpy),
        replaced(TensorVariable, "method_addcmul_", add_product),
        replaced(TensorVariable, "method_add_", numbers.add_scaled),
        replaced(TensorVariable, "method_addcdiv_", numbers.add_quotient),
        replaced(OptimizerVariable, "var_getattr", optimizer_getattr),
        replaced(CheckpointHigherOrderVariable, "_call_function", guards.call_checkpoint),
        replaced(UnspecializedNNModuleVariable, "call_function", guards.call_module),
        replaced(output_graph.OutputGraph, "_validate_outputs_safe_for_autograd_nodes",
                 validate_outputs),
        *([replaced(output_graph.OutputGraph, check, check_leaves)] if check in vars(output_graph.OutputGraph) else []),
        replaced(output_graph.OutputGraph, "remove_tensorify_specialized_graphargs",
                 remove_specialized),
        replaced(graph_compile, "tensorify_python_scalars", numbers.read_alone),
        replaced(VariableBuilder, "wrap_symfloat", wrap_symfloat),
        replaced(VariableBuilder, "_wrap", _tracked),
        mock.patch.object(VariableBuilder, "_type_dispatch", staticmethod(lambda: types_known)),
        *(replaced(*method) for method in (*texts.REPLACED, *lists.REPLACED, *items.REPLACED,
                                       *guards.REPLACED, *python.REPLACED, *shared.REPLACED, *schedulers.REPLACED, *hooks.REPLACED)),
        replaced(UserFunctionVariable, "call_function", call_function),
        replaced(LoggingLoggerVariable, "call_method", call_logger),
        replaced(SkipFunctionVariable, "call_function", call_skipped),
        replaced(next(c for c in (InstructionTranslatorBase, InstructionTranslator)
                      if "log_graph_break" in vars(c)), "log_graph_break", log_graph_break),
        replaced(ListIteratorVariable, "tp_iternext_impl" if "tp_iternext_impl" in vars(
            ListIteratorVariable) else "next_variable", next_item),  # 2.13, 2.11
        mock.patch.dict(compare_op_handlers, {
            symbol: functools.partial(compare, functools.partial(texts.comparing, compare_op_handlers[symbol]), function)
            for symbol, function in COMPARISONS.items()}),
        mock.patch.dict(handlers, {torch.autograd.grad: handle_grad,
                                   torch.is_tensor: handle_is_tensor,
                                   **{function: traced(form) for function, form in {**forms, **python.FORMS}.items()},
                                   **dict.fromkeys(RECURRENT, call_recurrent)}),
    )
    TensorifyState.clear()  # which numbers earlier frames had no use for: names are used again
    with contextlib.ExitStack() as stack:  # more than Python nests blocks
        for patch in patches:
            stack.enter_context(patch)
        yield
