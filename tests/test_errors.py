"""Errors say what, where and what to do, and each id has its section in docs/errors.md."""

import pickle
import re
from pathlib import Path

import pytest

from memopt_compile.errors import CaptureError, InfeasibleBudget, MemoptError

DOCS = Path(__file__).parents[1] / "docs" / "errors.md"
CLASSES = [MemoptError, *MemoptError.__subclasses__()]


def test_message_has_every_part():
    error = CaptureError("no gradient was captured", where="train.py:7", do="call backward()")
    assert str(error) == (
        "MEMOPT-E101: no gradient was captured\n"
        "  where: train.py:7\n"
        "  what to do: call backward()\n"
        "  see docs/errors.md#e101"
    )


def test_parts_that_are_unknown_are_left_out():
    text = str(CaptureError("no gradient was captured"))
    assert text == "MEMOPT-E101: no gradient was captured\n  see docs/errors.md#e101"


def test_where_is_kept_as_text():
    assert CaptureError("x", where=Path("a.py")).where == "a.py"


@pytest.mark.parametrize("kind", CLASSES)
def test_survives_pickling(kind):
    error = kind("what", where="where", do="do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error)


def test_a_refusal_keeps_its_bytes_when_pickled():
    copy = pickle.loads(pickle.dumps(InfeasibleBudget("what", smallest_peak_bytes=8, resident_bytes=3, budget_bytes=5)))
    assert (copy.smallest_peak_bytes, copy.resident_bytes, copy.budget_bytes) == (8, 3, 5)


def test_ids_are_unique():
    assert len({kind.id for kind in CLASSES}) == len(CLASSES)


def test_code_and_docs_name_the_same_ids():
    sections = re.findall(r"^## (E\d{3})\n\*\*`(\w+)`\*\*", DOCS.read_text(), flags=re.MULTILINE)
    assert sections == [(kind.id.removeprefix("MEMOPT-"), kind.__name__) for kind in CLASSES]
