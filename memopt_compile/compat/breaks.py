"""Where a traced graph ends before the step does: how to end it, where it was, and what torch says of it."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections import ChainMap
from collections.abc import Mapping
from types import CellType, CodeType
from typing import Any, NoReturn

from torch._dynamo import config
from torch._dynamo.exc import (
    InternalTorchDynamoError,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    Unsupported,
    unimplemented,
)
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._guards import TracingContext
from torch.utils._sympy.symbol import SymT, symbol_is_type

WITHOUT_SIZES = ("compute with all rows: torch.where, a product with the mask, ignore_index= of a loss; or decide "
                 "outside of the step")
PYTHON = sysconfig.get_path("stdlib")
LEFT = (Unsupported, SkipFrame, InternalTorchDynamoError)  # how Dynamo ends a frame that it leaves to Python


def run_in_eager(why: object) -> NoReturn:
    """Leave the frame being traced to Python: nothing of it is compiled."""
    raise SkipFrame(str(why)) from (why if isinstance(why, Exception) else None)


def cause_of(error: Exception) -> str:
    """What torch says of an operator that fails on fake tensors, without the call."""
    found = re.search(r"got (\w+\(.*?\))\n", str(error))
    return found[1] if found else str(error).splitlines()[0]


def restart(output: Any, why: str) -> NoReturn:
    """From a backend: trace the frame of `output` again, from nothing."""
    output.root_tx.speculation_log.clear()
    TensorifyState.clear()
    # Of Dynamo's restarts the one that it lets a backend ask for.
    raise TensorifyScalarRestartAnalysis(restart_reason=why)


def traced_now() -> Any:
    """The output of the frame that a backend is called for."""
    return InstructionTranslator.current_tx().output


def are_sizes_of_data_in_trace() -> bool:
    """Whether only the data tell a size in it, also if that has come to be taken for another."""
    return config.capture_dynamic_output_shape_ops and any(
        symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in traced_now().shape_env.var_to_range)


def restart_without_data_sizes(output: Any, why: str) -> NoReturn:
    """The same, with the graph ending where only the data tell the size of a tensor."""
    config.capture_dynamic_output_shape_ops = False  # till the end of the scope in which `output` is traced
    restart(output, why)


def demands_one_graph(output: Any) -> bool:
    """Whether the frame of `output` is compiled with ``fullgraph=True``."""
    return output.root_tx.one_graph or output.root_tx.error_on_graph_break


def break_graph(what: str, why: str, remedy: str) -> NoReturn:
    """End the traced graph here: the rest of the frame runs by the ordinary path."""
    unimplemented(gb_type=what, context="memopt", explanation=why, hints=[remedy])


def refuses_views(error: Exception) -> bool:
    """Whether AOTAutograd will not have one input be a view of another."""
    return isinstance(error, AssertionError) and "aot_autograd() does not yet handle" in str(error)


def is_of_the_tracer(error: Exception) -> bool:
    """Whether the frame is left to Python because Dynamo itself failed."""
    return isinstance(error, InternalTorchDynamoError)


def is_recompile_limit(error: Exception) -> bool:
    """Whether Dynamo leaves a frame to Python because it has been compiled often enough."""
    return "recompile limit exceeded" in str(error)


def recompile_limit() -> int:
    return config.recompile_limit


def is_differentiated(output: Any) -> bool:
    """Whether the trace so far holds something that autograd follows."""
    return any(getattr(node.meta.get("example_value"), "grad_fn", None) is not None for node in output.graph.nodes)


def is_outermost(output: Any) -> bool:
    """Whether the trace is in no region of its own, as a checkpoint's, which runs again."""
    return output.is_root_tracer()


def is_ahead(output: Any, name: str) -> bool:
    """Whether the frame itself has an attribute of this name behind the place that the trace has come to."""
    root = output.root_tx
    return any(each.argval == name for each in root.instructions[root.instruction_pointer or 0:])


def is_cut(gm: Any) -> bool:
    """Whether a line has ended this graph of Dynamo's before the function returns."""
    return gm.compile_subgraph_reason.graph_break


def line_now(output: Any) -> int:
    """The line of the frame itself that the trace has come to."""
    return output.root_tx.lineno


def can_end(output: Any) -> bool:
    """Whether the graph may end where the trace is, and the rest go on: not within a loop of the frame itself, or what
    cannot be entered again."""
    root = output.root_tx
    here, place = root.instructions.index, (root.instruction_pointer or 1) - 1
    backward = ((here(each.target), i) for i, each in enumerate(root.instructions) if each.target and i >= place)
    return root.should_compile_partial_graph() and not any(start <= place for start, _ in backward)


def is_named(output: Any, name: str) -> bool:
    """Whether the frame itself has an attribute of this name anywhere."""
    return name in output.root_tx.f_code.co_names


def closed_over(code: CodeType, closure: tuple[CellType, ...] | None) -> dict[str, Any]:
    """What the names of an outer function are, where they are anything yet."""
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure or ()) if cell != CellType()}


def frame_of(output: Any) -> tuple[CodeType, Mapping[str, Any]]:
    """The code of the frame itself, and what its names are."""
    root = output.root_tx
    return root.f_code, ChainMap(root.f_locals, closed_over(root.f_code, root.closure), root.f_globals)


def break_place(error: Any) -> tuple[str, int, str] | None:
    """(file, line number, code) of the innermost line outside torch, and Python's own modules, that ended a graph."""
    stack = getattr(error, "real_stack", None) or TracingContext.extract_stack()
    if is_of_the_tracer(error):  # whose message alone has it
        stack = [traceback.FrameSummary(file, int(line), "", line=code) for file, line, code in re.findall(
            r'File "(.+?)", line (\d+), in .*\n +(.*)', str(error))]
    frames = [f for f in stack if f.filename and not any(part in f.filename for part in ("/torch/", "/memopt_compile/"))
              and (not f.filename.startswith(PYTHON) or "site-packages" in f.filename)]
    return (frames[-1].filename, frames[-1].lineno, frames[-1].line or "") if frames else None


UNTRACED = {  # by class or function: reason and remedy
    "LRScheduler": ("torch does not trace LRScheduler.step", "call it behind the step, which then takes the new rate"),
    "pack_padded_sequence": ("torch does not trace pack_padded_sequence",
                             "give a network of one direction the padded batch, and leave the padding out of the loss"),
}


def break_reason(error: Any) -> tuple[str, str]:
    """(reason, remedy) from what Dynamo says when it ends a graph."""
    if is_of_the_tracer(error):
        return f"torch's tracer failed ({str(error).splitlines()[0]})", "take that line out of the step"
    if str(error).startswith("Unsupported Tensor.item()") or "_local_scalar_dense" in str(error):  # `.tolist()`, `max()` of Python
        return ("a number is read off a tensor, and the rest of the step needs it (or cannot be traced either)",
                "compute with the tensor itself (torch.where in place of `if`), or read it behind the update")
    if str(error).startswith("Data dependent operator"):
        return ("the value of a tensor decides, or goes where torch wants a plain number",
                "compute with the tensor itself (torch.where in place of `if`), or decide behind the update")
    if str(error).startswith("Dynamic shape operator"):
        found = re.search(r"Operator `(\S+)`'s output", str(error))
        return f"only the data tell how large the result of {found[1] if found else 'an operator'} is", (
            "give it output_size=" if "repeat_interleave" in str(error) else WITHOUT_SIZES)
    if "Could not guard on data-dependent expression" in str(error) or str(error).startswith("Data-dependent branching"):
        return "what the step does next depends on the data, or on a size that only these tell", WITHOUT_SIZES
    if raised := re.search(r"Observed exception.*raised exception (.+?)$", str(error), re.DOTALL | re.MULTILINE):
        return (f"the trace comes to an error, {raised[1].strip()}",
                "see whether eager raises it too; if not, take that line out of the step")
    if str(error).startswith("attempted to trace torch._numpy.random"):
        return "NumPy draws random numbers", "draw them by torch, or outside of the step"
    if str(error).startswith("Module-level backwards hooks"):
        return "a module has a hook on its backward", "remove it; a hook on its forward is traced"
    if str(error).startswith("Tensor.retain_grad()"):
        return ("the gradient of a tensor on the way is asked for, of which the graph keeps none",
                "have it computed: torch.autograd.grad(loss, [*parameters, tensor])")
    if skipped := re.match(r"Attempted to (?:call|inline) function marked as skipped.*?function `(\S+?)`", str(error), re.DOTALL):
        owner = skipped[1].split(".")[0]
        return UNTRACED.get(owner, (f"torch does not trace {skipped[1]}", "call it outside of the step"))
    if "proxy" in str(error).split("\n")[0] and "Generator" in str(error):
        return ("a generator is given to an operator, and a graph knows none but torch's own",
                "draw from torch's own generator, or ahead of the forward")
    if "requires_grad" in str(error).split("\n")[0]:
        return ("the step changes whether a tensor of its caller needs a gradient",
                "set that outside of the step, or name what is differentiated: backward(inputs=[...])")
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    explanation = [li.removeprefix("Explanation: ") for li in lines if li.startswith("Explanation: ")]
    hints = [li.removeprefix("Hint: ") for li in lines if li.startswith("Hint: ")]
    reason = lines[0] if lines else type(error).__name__
    return (f"{reason} ({explanation[0]})" if explanation else reason,
            hints[0] if hints else "take that line out of the step")
