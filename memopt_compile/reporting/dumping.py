"""The files of `dump=`: every graph, the plan, the program, the report and a picture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends import eager
from ..errors import OptionError
from .render import Report

if TYPE_CHECKING:
    from ..records import Compilation


def write(record: Compilation) -> None:
    """Write all that is known of `record`, its graphs aside, to its folder.

    Raises:
        OptionError: the folder cannot be written.
    """
    with _refusal(record):
        folder = _folder(record)
        (folder / "plan.txt").write_text(plan(record), encoding="utf-8")
        write_program(record, folder)
        write_report(record, folder)
        if record.after is not None and record.after.points:
            Report.of(record).draw(folder / "timeline.svg")


def write_graph(record: Compilation, name: str, text: str) -> None:
    """Write the text of one graph at once, so that it is there if the next pass fails.

    Raises:
        OptionError: the folder cannot be written.
    """
    with _refusal(record):
        (_folder(record) / f"{name}.txt").write_text(text, encoding="utf-8")


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
    return f"{made}\n\n{made.table()}\n" if made else "Every value is kept: no memory plan was needed or made.\n"


def _folder(record: Compilation) -> Path:
    """The folder of this compilation: the first free number, so that nothing is overwritten."""
    if record.folder is None:
        top, number = Path(record.options.dump or "."), 0
        top.mkdir(parents=True, exist_ok=True)
        while record.folder is None:
            folder = top / f"{number:02d}"
            try:
                folder.mkdir()  # Fails if another compilation, process or rank was first.
                record.folder = folder
            except FileExistsError:
                number += 1
    return record.folder


@contextlib.contextmanager
def _refusal(record: Compilation) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(f"the dump cannot be written: {error.strerror}",
                          where=f"dump={str(record.options.dump)!r}",
                          do="name a folder that can be created and written, or leave it out"
                          ) from error
