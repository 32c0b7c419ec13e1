"""A few rows through Inductor, in float32: the others differ only in what Dynamo traces.

Not the one with BatchNorm: the bias before it has a zero gradient, whose rounding Adam turns into
steps of full size, so float32 fixes nothing there (the float64 rows do).
"""

from __future__ import annotations

import pytest
import rows
import torch
from harness import compiled, largest_difference, train

pytestmark = pytest.mark.inductor


@pytest.mark.parametrize("name", ["zero_grad_first", "dropout", "scheduler_of_sgd",
                                  "micro_batches_then_clip", "branch", "while_loop", "mixture_of_experts"])
@pytest.mark.table(8)
def test_row(name):
    with torch._inductor.config.patch(fallback_random=True):  # eager's random numbers
        expected = train(rows.ROWS[name], dtype=torch.float32)
        got, compilations = compiled(rows.ROWS[name], "inductor", dtype=torch.float32)
    # Adam divides small gradients by their own size, so their rounding shows whole in its state.
    del expected["optimizers"], got["optimizers"]
    difference, where = largest_difference(expected, got)
    assert difference <= 1e-5, f"{where}: {difference:.1e}"
    assert {c.lowering for c in compilations} == {"inductor"}
    assert {c.kind for c in compilations} == {"step"}
