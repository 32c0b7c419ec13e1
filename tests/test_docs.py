"""Every Python block of every document runs, and every link in the documents leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_TEST = {"reading_a_report.md"}  # run by test_report


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", [d for d in DOCUMENTS if d.name not in OWN_TEST], ids=lambda p: p.name)
def test_python_blocks_run(path, tmp_path):
    torch._dynamo.reset()
    # A file of its own, so that reports can quote the lines.
    kept = [b for b in blocks(path) if "import" in b or "record" in b or "report" in b]
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n".join(kept))
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "document"})


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted((ROOT / "docs").rglob("*/*.md"))],
                         ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_commands_of_the_readme_exist():
    for command in re.findall(r"^\./(\S+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        assert (ROOT / command).stat().st_mode & 0o100, command
