"""The rows with everything on a CUDA device: its default forms of optimizers, attention and dropout."""

from __future__ import annotations

import contextlib
import os

import pytest
import rows
import test_rows
import torch

from memopt_compile.errors import OptionError
from memopt_compile.options import Options

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Not where cuDNN draws eager's dropout, from a state of its own: what is traced cell by cell draws by PyTorch's generator.
ROWS = [name for name in rows.ROWS if name not in ("lstm_with_dropout", "gru_with_dropout")]
# Before torch 2.12 Inductor runs what draws in an order of its own, also with `fallback_random`.
DRAWN_IN_ORDER = [name for name in ROWS if torch.__version__ >= "2.12" or name not in (
    "random_numbers_that_nobody_reads", "random_shares_that_change")]
# Where a count is divided by a number, which Inductor's code for Triton does in 32 bits.
TOLERANCE = {"weighted_means": 1e-7}

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


@pytest.mark.parametrize("name", DRAWN_IN_ORDER)
@pytest.mark.skipif(NOTHING_COMPUTED, reason="Triton's kernels compute nothing here")
def test_row_by_inductor(name):
    with torch._inductor.config.patch(fallback_random=True):  # eager's random numbers
        test_rows.check(rows.ROWS[name], graphs=test_rows.GRAPHS.get(name, 2), until=test_rows.UNTIL.get(name, 2),
                        tolerance=TOLERANCE.get(name, 1e-9), lowering="inductor")


@pytest.mark.parametrize("name", ROWS)
def test_row_as_a_cuda_graph(name, monkeypatch):
    """Counts of steps and rates go ahead of it, as they are in the host's memory. What has sizes from data is refused."""
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "cuda_graphs", True)
    refused = rows.ROWS[name].__module__ == "rows_data_sizes" and name != "contrastive"  # whose mask is of constants
    with pytest.raises(OptionError, match="E201: only the data tell a size") if refused else contextlib.nullcontext():
        test_rows.test_row(name)
