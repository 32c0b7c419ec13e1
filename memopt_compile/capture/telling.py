"""The one line that says why a step is not captured whole, and when it is due.

It is said once for each compiled function, since after the first break torch compiles the parts and finds more. Where
the graph ends before the forward nothing may be lost: that is put off until what follows is known to be whole or not.
"""

from __future__ import annotations

import dis
import logging
import weakref
from typing import Any

from ..compat import breaks

log = logging.getLogger("memopt_compile")

stepped: weakref.WeakSet = weakref.WeakSet()  # functions of which a frame was captured as a whole step
_beside: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each function, its frames, and which are beside the step
_ended: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each function, the lines where its graph was ended
_told: weakref.WeakSet = weakref.WeakSet()
_unsaid: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def forget() -> None:
    """Tell again of graphs that end early, as after `torch.compiler.reset()`."""
    _told.clear()
    _unsaid.clear()


def note_place(notes: Any) -> None:
    """Note of a frame that was traced for the first time whether all of it is beside the step: what Python does with
    metrics behind it, or a function that prepares a batch. These may want a graph for each of their numbers."""
    if notes.again:
        return
    first = notes.step not in _beside
    frames = _beside.setdefault(notes.step, weakref.WeakKeyDictionary())
    frames.setdefault(notes.frame, (notes.stepped or not (first or _is_resumed(notes.frame))) and not (
        notes.backwards or notes.updates or notes.begun or _has_more(notes.frame)))


def note_end(notes: Any, line: int) -> None:
    """Note that a whole step's graph is ended at this line of its frame, on purpose: nothing is behind but metrics."""
    _ended.setdefault(notes.step, set()).add(line)


def is_beside(step: Any, code: Any) -> bool:
    """Whether Python may run this frame, for there is nothing of the step in it."""
    known = _beside.get(step, {}).get(code)
    return code.co_firstlineno in _ended.get(step, ()) and _is_resumed(code) and not _has_more(code) if known is None else known


def _is_resumed(code: Any) -> bool:
    return code.co_name.startswith("torch_dynamo_resume_in_")


def _has_more(code: Any) -> bool:
    """Whether a frame names what steps have. What torch runs behind a break is all of the function, and begins with a
    jump."""
    found = list(dis.get_instructions(code))
    start = next((each.argval for each in found if each.opcode in dis.hasjrel), 0) if _is_resumed(code) else 0
    return any(each.argval in ("backward", "step") for each in found if each.offset >= start and each.opcode in dis.hasname)


def tell(notes: Any, where: str, cause: str, remedy: str) -> None:
    """Note why the step of these `capture.Notes` is not whole, and say so."""
    notes.reason = notes.reason or f"{where}: {cause}"
    if notes.step not in _told:
        _told.add(notes.step)
        then = (f"{notes.needs} is for a whole step" if notes.needs else
                "It is an error by fullgraph=True" if notes.one_graph else
                "It runs by the ordinary path, with right numbers and without memopt's savings")
        log.warning("%s: not captured whole: %s. %s. Remedy: %s", where, cause, then, remedy)


def tell_of_break(notes: Any, error: Any, cause: str = "", remedy: str = "") -> None:
    """The same of the user's line that ended a graph, by torch's own words if none are given."""
    if line := _line(error):
        told_cause, told_remedy = breaks.break_reason(error)
        tell(notes, line, cause or told_cause, remedy or told_remedy)


def tell_where_it_ends(notes: Any, output: Any, error: Any) -> None:
    """Tell of the end of a graph where a step stops being one. After the optimizer has run (a ``loss.item()`` to
    return, say) the step is whole already, and before the forward it is not begun."""
    begun, to_come = breaks.is_differentiated(output), breaks.is_ahead(output, "backward")
    to_come = to_come or not (begun or notes.resumed or breaks.is_named(output, "backward"))  # in a function of it
    if notes.resumed:
        ends = begun and to_come and not notes.backwards
    elif begun or to_come or notes.step not in stepped:
        ends = not (notes.backwards and notes.updates) and (begun or not to_come)
    else:  # a function that the step calls behind its update
        ends = False
    if ends:
        tell_of_break(notes, error)
    elif to_come and not begun:
        put_off(notes, error)
        notes.to_come = breaks.can_end(output)


def tell_of_the_limit(notes: Any) -> None:
    notes.left = True
    tell(notes, notes.where, f"it was compiled {breaks.recompile_limit()} times, each time for another value, and "
         "torch stops there", 'TORCH_LOGS="recompiles" names the value: keep it the same, or out of the step')


def tell_of_a_tail(notes: Any) -> None:
    """Say once that Python runs what is behind a whole step, since torch has compiled it often enough."""
    if notes.step in stepped and notes.step not in _told:
        _told.add(notes.step)
        log.warning("%s: what follows the step was compiled %d times, each time for another value, and torch stops there. "
                    "Python runs it, with right numbers; of the step nothing is lost. Remedy: TORCH_LOGS=\"recompiles\" "
                    "names the value: keep it the same, or use it outside of the step", notes.where,
                    breaks.recompile_limit())


def put_off(notes: Any, error: Any) -> None:
    """Have `settle` tell of this break, if it has to be."""
    if line := _line(error):
        _unsaid.setdefault(notes.step, (line, *breaks.break_reason(error)))


def settle(notes: Any, whole: bool) -> None:
    """The frame being traced is known to be a `whole` step, or a part of one that is not."""
    unsaid = _unsaid.pop(notes.step, None)
    if unsaid and not whole:
        tell(notes, *unsaid)


def _line(error: Any) -> str | None:
    place = breaks.break_place(error)
    if place is None:
        return None
    file, line, code = place
    return f"{file.rsplit('/', 1)[-1]}:{line} `{code.strip()}`"
