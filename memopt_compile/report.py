"""What memopt did with a step, for people: `report` after it ran, `explain` without running it.

`driver` fills a `Compilation` while it compiles and remembers it under the code object that was
traced; `report` finds it again from the compiled function. `render` puts it into words and
`dumping` into files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import OptionError
from .records import Compilation, code_of, compilations, planning, remember
from .reporting.explaining import explain
from .reporting.render import LiveTensor, Report

__all__ = ["Compilation", "LiveTensor", "Report", "explain", "planning", "remember", "report"]


def report(step: Callable[..., Any]) -> Report:
    """What memopt did with `step`, a compiled function, method or module that has run.

    Compilations are found by the code of the function. If there are several (for other shapes, or
    of the parts around a graph break), the report is of the latest that holds a whole step, else
    of the latest, and `Report.others` has the rest. Two steps made by one factory function share
    their code: the report is of the one compiled last.

    Raises:
        OptionError: `step` is no function, or memopt has not compiled it.
    """
    code = code_of(step)
    found = compilations(code)
    if not found:
        raise OptionError(
            "memopt has compiled nothing of this function",
            where=f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})",
            do='compile it with torch.compile(step, backend="memopt") and call the result once; '
            "memopt.explain(step, *args) plans without running")
    chosen = [each for each in found if each.kind == "step"] or found
    others = [each for each in found if each is not chosen[-1]]
    return Report.of(chosen[-1], others)
