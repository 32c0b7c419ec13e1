"""The files of `dump=`: every graph, the plan, the program, the report and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .backends import eager
from .errors import OptionError
from .render import Report

if TYPE_CHECKING:
    from .records import Compilation


def write(record: Compilation, top: Path) -> Path:
    """Write everything about `record` to a new numbered folder in `top`; returns the folder.

    Nothing that is there already is touched: each compilation gets the next free number.

    Raises:
        OptionError: the folder cannot be written.
    """
    try:
        folder = _new_folder(top)
        for name, text in record.texts.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        (folder / "plan.txt").write_text(plan(record), encoding="utf-8")
        write_program(record, folder)
        write_report(record, folder)
        if record.after is not None and record.after.points:
            Report.of(record).draw(folder / "timeline.svg")
    except OSError as error:
        raise OptionError(f"the dump cannot be written: {error.strerror}", where=f"dump={str(top)!r}",
                          do="name a folder that can be created and written, or leave it out"
                          ) from error
    return folder


def write_report(record: Compilation, folder: Path) -> None:
    """(Re)write `report.txt`: once when compiled, again when the first run was measured."""
    (folder / "report.txt").write_text(str(Report.of(record)), encoding="utf-8")


def write_program(record: Compilation, folder: Path) -> None:
    """(Re)write `program.py`, what the lowering made of the step: once, and when it is there."""
    text = record.program or "# the lowering gave no text\n"
    if record.program is None and record.step is not None and record.lowering == "eager":
        text = eager.source(record.step)[0]
    (folder / "program.py").write_text(text, encoding="utf-8")


def plan(record: Compilation) -> str:
    """The memory plan as text."""
    made = getattr(record.step, "plan", None)
    return f"{made}\n" if made else "Every value is kept: no memory plan was needed or made.\n"


def _new_folder(top: Path) -> Path:
    top.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = top / f"{number:02d}"
        try:
            folder.mkdir()  # Fails if another compilation or rank was first.
            return folder
        except FileExistsError:
            number += 1
