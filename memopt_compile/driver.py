"""The front door: `torch.compile(step, backend="memopt", options={...})` ends here.

The story of one compilation: read the options, say what kind of graph Dynamo handed over,
have AOTAutograd turn it into one ATen graph, give that graph roles and phases, run the
pipeline over it, hold its predicted peak against the budget, lower it, and remember all of
this for `memopt.report`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import (
    arena,
    build,
    capture,
    checks,
    compat,
    data_sizes,
    devices,
    folding,
    inner_results,
    kinds,
    loops,
    old_gradients,
    pipelines,
    programs,
    progress,
    replaced,
    second_derivative,
    unused_outputs,
    zero,
)
from .backends import eager, inductor
from .capture import iterations, read_later, telling, update_operator
from .compat import breaks, data, hooks, trace, used_up
from .distributed import tensor_parallel, wrapping
from .errors import CaptureError, MemoptError, OptionError
from .finiteness import random_numbers
from .options import Options
from .records import Compilation, forget, nothing_runs, remember
from .step_graph import source_line
from .verification import regions, run_regions_once, verifying

log = logging.getLogger("memopt_compile")


class _NotWhole(Exception):
    """AOTAutograd wants to differentiate the step again: it is not a whole step."""


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *,
            options: Mapping[str, Any] | None = None, mode: str | None = None) -> Callable:
    """Compile one Dynamo graph. `options` are the fields of `Options`; `mode` is refused.

    A `MemoptError` is raised by the first call of the result, so that the user sees it as
    itself and not as a failure of torch.
    """
    try:
        opts = Options.from_dict(options)
        if backend.uninstalled:
            raise CaptureError("memopt was uninstalled, and Dynamo's trace of a step is not for it any more",
                               where="memopt_compile.driver.uninstall()",
                               do="start a new process, or compile with another backend")
        if mode is not None:
            raise OptionError("mode is Inductor's", where=f"mode={mode!r}",
                              do="leave it out: memopt's settings are in options={...}")
        numbers = read_later.made_of_given(gm)
        with progress.stage(capture.notes().where):
            run = _compile(gm, example_inputs, opts)
        return read_later.with_numbers(run, numbers) if numbers else run
    except MemoptError as error:
        return _raiser(error)


def _raiser(error: MemoptError) -> Callable:
    def fail(*inputs: Any) -> None:
        raise error

    return fail


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Callable:
    notes = capture.notes()
    if notes.refusal:
        raise notes.refusal
    kind = kinds.kind_of(gm, opts, notes)
    notes.trace = notes.trace or kind == "evaluation" and breaks.traced_now()  # capture has seen nothing of it
    if notes.checks and checks.branches(gm) and kind == "model":
        notes.branch_at_once()
    reading = _read_later(gm, kind, notes)
    if kind == "model" and data_sizes.are_avoidable():
        data_sizes.trace_without(notes.where, "only a whole step is planned")
    notes.begun = notes.begun or kind == "model" and kinds.differentiable(gm)
    if kind == "step" or notes.begun:
        telling.settle(notes, whole=kind == "step")
    replaced.check_optimizers(notes.optimizers, notes.where)
    zero.check_writes(gm, _quoted)
    if kind == "model" and kinds.differentiable(gm):
        zero.check_model(opts.zero, build.dynamo_inputs(gm), notes.where)
    metrics = notes.resumed and notes.step in telling.stepped and not kinds.differentiable(gm)  # behind the step
    before = notes.to_come and not notes.begun and not any(  # of the batch alone
        isinstance(given, torch.Tensor) and given.requires_grad for _, given, _ in build.dynamo_inputs(gm))
    if kind == "step" or kind == "model" and not (metrics or before):
        folding.check(opts, kind, notes)
        _check_budget(opts, kind, notes)
    if notes.shortened and (kind == "model" or opts.verify):
        notes.trace_again("only a whole step can be completed, and verify runs what was traced")
    lowering = _lowering(opts.lowering, _device(example_inputs))
    if lowering == "inductor" and not nothing_runs():
        inductor.warm_up({t.device.type for t in example_inputs if isinstance(t, torch.Tensor)})
    record = Compilation(kind=kind, options=opts, lowering=lowering, where=notes.where,
                         reason=notes.reason, device=_device(example_inputs))
    remember(notes.function, record)
    behind = kind == "model" and metrics
    log.info("%s: %s", notes.where, "what follows the step, compiled apart" if behind else _kind_line(kind, notes))
    if kind == "model" and (notes.reason or notes.resumed) and used_up.backwards_apart(kinds.results(gm)):
        return _in_eager(gm, record, notes, "parts of it that eager can go back through one by one are one piece",
                         "take the line out that cuts the step")
    inner = inner_results.positions(gm) if kind == "model" else []
    if asked := inner and inner_results.asked_for_by(breaks.traced_now()):
        return _in_eager(gm, record, notes, f"{asked} may ask for the gradient of a tensor that a piece of the step goes on from",
                         inner_results.REMEDY)
    if kind == "model" and hooks.are_there(breaks.traced_now()):
        telling.tell(notes, notes.where, "a hook is registered on a tensor whose backward is not in this graph", hooks.REMEDY)
        hooks.leave(breaks.traced_now())
    if kind == "model":
        compat.settle_unused_floats(gm)
        piece, needed = second_derivative.copied(gm), unused_outputs.sources(gm)
        origin = build.dynamo_inputs(gm)
        with zero.naming_mixtures(notes.where):
            run = zero.together_as_a_model(_compile_model(gm, example_inputs, record), origin, record)
        run = unused_outputs.without_zeros(run, needed)
        run = second_derivative.twice_differentiable(run, piece, notes.where, record.device)
        return inner_results.without_hooks(run, inner, notes.where)
    run = _compile_step(gm, example_inputs, record, notes)
    if record.kind == "step":
        telling.stepped.add(notes.step)
    return reading(run) if reading else run


def _read_later(gm: fx.GraphModule, kind: str, notes: capture.Notes) -> Callable[[Callable], Callable] | None:
    """Have a step's graph return what Python reads numbers off; see `read_later`."""
    if not notes.reads and kind == "model":
        return None
    try:
        if kind == "model":
            raise read_later.Needed("there is no step")
        return read_later.take_out(gm, reads=notes.reads > 0)
    except read_later.Needed as error:
        if notes.reads and not breaks.demands_one_graph(notes.trace):
            notes.read_at_once(error)
        return None


def _lowering(wanted: str, device: torch.device) -> str:
    """What the step is lowered to: where Inductor has no compiler, the eager lowering."""
    if wanted == "eager" or inductor.compiler_available(device):
        return wanted
    _say_there_is_no_compiler("C++ compiler" if device.type == "cpu" else "Triton")
    return "eager"


@functools.cache  # once a process
def _say_there_is_no_compiler(missing: str) -> None:
    log.warning("no %s found: running the eager lowering (for Inductor, %s)", missing,
                "install triton" if missing == "Triton" else "install g++ or set CXX")


def _check_budget(opts: Options, kind: str, notes: capture.Notes) -> None:
    """A budget is of a whole step's peak, which only a step captured whole lets us know. An arena is for
    what such a step gathers and scatters."""
    if opts.arena and kind == "model":
        raise OptionError("there is no step to plan an arena for: " + (
            notes.reason or "there is no backward() in the compiled function"), where=f"{notes.where}, arena=True",
            do="compile the whole step (forward, backward() and opt.step()), or leave arena out")
    if opts.memory_budget is not None and kind == "model":
        raise OptionError(
            "the budget cannot be kept: " + (notes.reason or "there is no backward() in the compiled function"),
            where=f"{notes.where}, memory_budget={opts.memory_budget!r}",
            do="compile the whole step (forward, backward() and opt.step()) so that it is captured "
            "in one graph, or leave memory_budget out")


def _check_left(options: Mapping[str, Any] | None, notes: capture.Notes) -> None:
    """The same for a frame of which Dynamo compiles nothing, so that no graph comes to the backend."""
    if notes.reason and (notes.backwards or notes.left or notes.step not in telling.stepped):
        opts = Options.from_dict(options)
        remember(notes.function, Compilation(kind="ordinary", options=opts, lowering=opts.lowering, where=notes.where,
                                              reason=notes.reason))
        folding.check(opts, "model", notes)
        _check_budget(opts, "model", notes)
        zero.check_ordinary(opts.zero, notes.where)


def _kind_line(kind: str, notes: capture.Notes) -> str:
    if kind == "model":
        return "model mode (no backward in the graph): activations only"
    if kind == "evaluation":
        return "an evaluation (no backward in the function), in one graph"
    names = ", ".join(sorted({type(o).__name__ for o in notes.optimizers})) or "no optimizer"
    traced = f"{notes.backwards} backward(s)" + "".join(
        f", {iterations.TRACED} of {len(loop.chunks)} micro-batches" for loop in notes.loops
        if loop.shortened)
    return f"whole-step mode: traced {traced}, {names}, in one graph"


def _compile_step(gm: fx.GraphModule, example_inputs: Sequence[Any], record: Compilation,
                  notes: capture.Notes) -> Callable:
    origin = build.dynamo_inputs(gm)
    storages = zero.check(record.options, origin, notes.optimizers, notes.where)
    if record.options.arena and storages:
        record.arena = arena.buffer_of(storages[0].parameter())
    _detach_outputs(gm, notes)
    compat.settle_unused_floats(gm)
    data.without_grad(gm.graph)
    gm.recompile()
    wholes: list[zero.Storage] = []

    def lower(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        module = update_operator.unfolded(module)
        if record.lowering == "inductor":
            module = inductor.prepare(module)
        if loops.complete(module.graph) < notes.shortened:
            raise loops.Unlike("no iteration reads its chunk")
        nonlocal wholes
        step = build.step_graph(module, origin)
        wholes = zero.add_wholes(step, origin)
        mesh = storages[0].all_ranks if storages and not nothing_runs() else None  # one rank may plan alone
        if record.options.partition_activations:
            step.parallel = tensor_parallel.group_of(step, origin, notes.where)
            mesh = mesh or step.parallel.mesh
        run = zero.together(lambda: programs.fitted(step, record), record, mesh, notes.function)
        return zero.with_wholes(run, wholes) if wholes else run

    def differentiate(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        raise _NotWhole

    eager_lowering = record.lowering == "eager"
    decompositions = compat.loss_decompositions() if eager_lowering else inductor.decompositions()
    try:
        if any(getattr(value, "grad_fn", None) is not None for value in kinds.results(gm)) or checks.of_gradients(gm):
            raise _NotWhole
        data_sizes.check_squeezes(gm)
        with trace.for_the_eager_lowering() if eager_lowering else contextlib.nullcontext(), \
                update_operator.folded(gm, example_inputs, decompositions):
            run = compat.aot_module_simplified(
                gm, example_inputs, fw_compiler=differentiate, inference_compiler=lower,
                keep_inference_input_mutations=True, decompositions=decompositions)
    except Exception as error:
        unlike, views = _cause(error, loops.Unlike), breaks.refuses_views(error)
        if unlike or notes.shortened and (views or _caused_by(error, _NotWhole)):
            notes.trace_again(unlike or "the step is not whole")
        unbounded = _cause(error, data_sizes.REFUSED)
        if data_sizes.are_avoidable() and (unbounded or not _caused_by(error, (MemoptError, _NotWhole))):
            forget(notes.function, record)
            data_sizes.trace_without(notes.where, unbounded or error)
        if checks.branches(gm):
            notes.branch_at_once()
        if not (views or unbounded or _caused_by(error, _NotWhole)):
            raise _cause(error, MemoptError) or error
        line, why, remedy = (
            ("", "an input of the step is a view of another that it changes",
             "give the step the tensor that is viewed, and take the view in it") if views else
            data_sizes.refusal(unbounded) if unbounded else _why_not_whole(gm))
        if breaks.demands_one_graph(notes.trace):
            raise CaptureError(why, where=f"{line or notes.where}, fullgraph=True", do=remedy) from None
        return _in_eager(gm, record, notes, why, remedy, line)
    if record.options.partition_activations:
        run = tensor_parallel.comparing(run, record.step, origin, notes.where)
    run = zero.together_with_others(run, storages, wholes, record) if storages else run
    if record.options.verify:
        run = verifying(run, gm, record)
    if checks.branches(gm):
        if not (checks.can_be_left(record.step) and (eager_lowering or inductor.keeps_order(
                record.step, record.options.pieces))):
            notes.branch_at_once()
        run = checks.by_eager(run, notes.frame, functools.partial(random_numbers, record.device))
    return old_gradients.dropping(run, notes.replaced_at_checks, {
        i: label for i, (label, _, _) in enumerate(origin)
        if label in notes.replaced_gradients and not _reads_gradient(origin, label)})


def _why_not_whole(gm: fx.GraphModule) -> tuple[str, str, str]:
    """The user's line that keeps the step from being whole, what it does, and the remedy."""
    if check := checks.of_gradients(gm):
        return (_quoted(check), "a check of what gradients made may end the step before they change anything",
                "check the loss, or check behind the step")
    for node in gm.graph.output_node().all_input_nodes:
        if getattr(node.meta.get("example_value"), "requires_grad", False):
            return (_quoted(node), "the step returns a tensor that is still differentiable",
                    "detach it, or do its backward in the step")
    return (_quoted(data.write_that_is_followed(gm.graph)), "the step changes a tensor that autograd still follows",
            "make such changes under torch.no_grad()")


def _quoted(node: fx.Node | None) -> str:
    """The user's line that made `node`, as ``file:line `code```."""
    line = node and source_line(node)
    return "{} `{}`".format(*line.split(" ", 1)) if line and " " in line else ""


def _in_eager(gm: fx.GraphModule, record: Compilation, notes: capture.Notes, why: str, remedy: str,
              line: str = "") -> Callable:
    """The graph as it was traced, uncompiled."""
    telling.tell(notes, line or notes.where, why, remedy)
    _check_budget(record.options, "model", notes)
    record.kind, record.reason = "ordinary", notes.reason
    if regions(gm) and not notes.left:
        notes.leave("the step is not whole, and uncompiled its checkpoints would not be as in eager")
    run_regions_once(gm)
    return gm.forward


def _reads_gradient(origin: Sequence[tuple[str, Any, bool]], leaf: str) -> bool:
    return any(label == f"{leaf}.grad" for label, _, _ in origin)


def _compile_model(gm: fx.GraphModule, example_inputs: Sequence[Any], record: Compilation) -> Callable:
    """A model or a loss alone: its forward and backward, lowered as `torch.compile` does."""
    if record.lowering == "inductor":
        return compat.compile_with_inductor(gm, example_inputs)
    origin = build.hollow(build.dynamo_inputs(gm))

    def lower(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        step = build.step_graph(module, origin, kind="model")
        if not data_sizes.are_in(module.graph):
            pipelines.run(step, pipelines.default(record.options, "eager"))
        return eager.lower(step)

    with trace.for_the_eager_lowering(), trace.no_donated_buffers():
        return compat.aot_module_simplified(
            gm, example_inputs, fw_compiler=lower, bw_compiler=lower, inference_compiler=lower,
            partition_fn=compat.min_cut_partition, keep_inference_input_mutations=True)


def _detach_outputs(gm: fx.GraphModule, notes: capture.Notes) -> None:
    """Return used-up tensors without their autograd graph, so that the graph is whole."""
    output = gm.graph.output_node()
    of_autograd = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)  # otherwise see `kinds`
    results = []
    for value in output.args[0]:
        fake = value.meta.get("example_value") if isinstance(value, fx.Node) else None
        if getattr(fake, "grad_fn", None) is not None and (not of_autograd or used_up.used_up(notes.trace, fake)):
            with gm.graph.inserting_before(output):
                detached = gm.graph.call_method("detach", (value,))
            detached.meta["example_value"] = fake.detach()
            value = detached
        results.append(value)
    output.args = (tuple(results),)
    gm.recompile()


def _device(inputs: Sequence[Any]) -> torch.device:
    return next((i.device for i in inputs if isinstance(i, torch.Tensor) and i.device.type != "cpu"),
                torch.device("cpu"))


def _cause(error: BaseException | None, kind: type | tuple[type, ...]) -> Any:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _caused_by(error: BaseException, kind: type | tuple[type, ...]) -> bool:
    return _cause(error, kind) is not None


def _reset() -> None:
    """What `torch.compiler.reset()` asks of a backend."""
    telling.forget()
    inductor.forget()


def uninstall() -> None:
    """Take away what memopt has changed in the process: Dynamo's wrapper, methods of DTensor, the heap's thresholds."""
    _unwrap()
    backend.uninstalled = True
    wrapping.put_back()
    devices.give_freed_bytes_back()


backend.reset = _reset
backend.uninstalled = False
_unwrap = capture.install(lambda function: function is backend, _check_left)
