"""Where a traced graph ends before the step does: how to end it, where it was, and what torch says of it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis, Unsupported, unimplemented
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import TracingContext

LEFT = (Unsupported, SkipFrame)  # how Dynamo ends a frame that it leaves to Python


def run_in_eager(why: object) -> NoReturn:
    """Leave the frame being traced to Python: nothing of it is compiled."""
    raise SkipFrame(str(why)) from (why if isinstance(why, Exception) else None)


def restart(output: Any, why: str) -> NoReturn:
    """From a backend: trace the frame of `output` again, from nothing."""
    output.root_tx.speculation_log.clear()
    TensorifyState.clear()
    # Of Dynamo's restarts the one that it lets a backend ask for.
    raise TensorifyScalarRestartAnalysis(restart_reason=why)


def demands_one_graph(output: Any) -> bool:
    """Whether the frame of `output` is compiled with ``fullgraph=True``."""
    return output.root_tx.one_graph or output.root_tx.error_on_graph_break


def break_graph(what: str, why: str, remedy: str) -> None:
    """End the traced graph here: the rest of the frame runs by the ordinary path."""
    unimplemented(gb_type=what, context="memopt", explanation=why, hints=[remedy])


def refuses_views(error: Exception) -> bool:
    """Whether AOTAutograd will not have one input be a view of another."""
    return isinstance(error, AssertionError) and "aot_autograd() does not yet handle" in str(error)


def is_recompile_limit(error: Exception) -> bool:
    """Whether Dynamo leaves a frame to Python because it has been compiled often enough."""
    return "recompile limit exceeded" in str(error)


def recompile_limit() -> int:
    return torch._dynamo.config.recompile_limit


def is_differentiated(output: Any) -> bool:
    """Whether the trace so far holds something that autograd follows."""
    return any(getattr(node.meta.get("example_value"), "grad_fn", None) is not None for node in output.graph.nodes)


def is_ahead(output: Any, name: str) -> bool:
    """Whether the frame itself has an attribute of this name behind the place that the trace has come to."""
    root = output.root_tx
    return any(each.argval == name for each in root.instructions[root.instruction_pointer or 0:])


def break_place(error: Any) -> tuple[str, int, str] | None:
    """(file, line number, code) of the innermost line outside torch that ended a graph."""
    stack = getattr(error, "real_stack", None) or TracingContext.extract_stack()
    frames = [f for f in stack if f.filename and "/torch/" not in f.filename
              and "/memopt_compile/" not in f.filename]
    return (frames[-1].filename, frames[-1].lineno, frames[-1].line or "") if frames else None


def break_reason(error: Any) -> tuple[str, str]:
    """(reason, remedy) from what Dynamo says when it ends a graph."""
    if str(error).startswith("Unsupported Tensor.item()"):
        return ("a number is read off a tensor, and the rest of the step needs it (or cannot be traced either)",
                "compute with the tensor itself (torch.where in place of `if`), or read it behind the update")
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    explanation = [li.removeprefix("Explanation: ") for li in lines if li.startswith("Explanation: ")]
    hints = [li.removeprefix("Hint: ") for li in lines if li.startswith("Hint: ")]
    reason = lines[0] if lines else type(error).__name__
    return (f"{reason} ({explanation[0]})" if explanation else reason,
            hints[0] if hints else "take that line out of the step")
