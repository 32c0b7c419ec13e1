"""The rows with everything on a CUDA device: its default forms of optimizers, attention and dropout."""

from __future__ import annotations

import os

import pytest
import rows
import test_rows
import torch

from memopt_compile.options import Options

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Under a default device `torch.compile` itself loses the device of a `linspace` given to `backward`, and of a `randn`.
ROWS = [name for name in rows.ROWS if name != "default_device"]

NOTHING_COMPUTED = "WITHOUT_GPU" in os.environ and "TRITON_INTERPRET" not in os.environ


@pytest.fixture(autouse=True)
def _on_cuda():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    test_rows.test_row(name)


@pytest.mark.parametrize("name", rows.OPTIMIZERS)
def test_optimizer(name):
    test_rows.test_optimizer(name)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.skipif(NOTHING_COMPUTED, reason="Triton's kernels compute nothing here")
def test_row_by_inductor(name):
    with torch._inductor.config.patch(fallback_random=True):  # eager's random numbers
        test_rows.check(rows.ROWS[name], graphs=test_rows.GRAPHS.get(name, 2), until=test_rows.UNTIL.get(name, 2),
                        lowering="inductor")


@pytest.mark.parametrize("name", [n for n in ROWS if n != "state_loaded_in_the_middle"])
def test_row_as_a_cuda_graph(name, monkeypatch):
    """With counts of steps on the device; in float32 there, which a loaded state shows beyond this test's bound."""
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "cuda_graphs", True)
    for each in (torch.optim.Adam, torch.optim.AdamW):
        monkeypatch.setitem(each.__init__.__kwdefaults__, "capturable", True)
    test_rows.test_row(name)
