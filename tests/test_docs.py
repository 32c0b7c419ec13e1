"""Every code block of every document runs, and every link leads somewhere.

The Python blocks of a document are one script; that of the README is run as a user would, the others from a
process that has imported torch. A shell block runs as well, in the repository and
by the `python` of the tests, unless the line `<!-- not run by the tests: WHY -->` stands before it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import run_script

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# `text` is what a program prints; test_report runs the blocks of the page on reports.
LANGUAGES = {"python", "sh", "text"}
ELSEWHERE = {"reading_a_report.md"}


class Block(NamedTuple):
    language: str
    text: str
    exempt: bool


def blocks(path: Path) -> list[Block]:
    found = re.findall(r"(<!-- not run by the tests: .+ -->\n+)?^```(\w*)\n(.*?)^```$",
                       path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [Block(language, text, bool(marker)) for marker, language, text in found]


def with_blocks(language: str) -> list[Path]:
    return [d for d in DOCUMENTS if d.name not in ELSEWHERE
            and any(b.language == language and not b.exempt for b in blocks(d))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_block_is_of_a_language_that_is_tested(path):
    assert {block.language for block in blocks(path)} <= LANGUAGES
    assert not [b for b in blocks(path) if b.exempt and b.language != "sh"]


@pytest.mark.parametrize("path", with_blocks("python"), ids=name)
def test_python_blocks_run(path, tmp_path):
    script = tmp_path / f"{path.stem}.py"  # A file, so that reports can quote its lines.
    script.write_text("\n".join(b.text for b in blocks(path) if b.language == "python"), "utf-8")
    if path.name == "README.md":
        run([sys.executable, str(script)], tmp_path)
    else:
        run_script(script, folder=tmp_path)


@pytest.mark.parametrize("path", with_blocks("sh"), ids=name)
def test_shell_blocks_run(path):
    for block in blocks(path):
        if block.language == "sh" and not block.exempt:
            run(["bash", "-euc", block.text])


def run(command: list[str], folder: Path = ROOT) -> None:
    ours = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": ours},
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_scripts_of_the_readme_can_be_started():
    scripts = re.findall(r"^\./(\S+)", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert {"run.sh", "test.sh"} <= set(scripts)
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), script
