"""The steps that `on_cuda.py` compares train, small and on a CPU."""

import on_cuda
import pytest


@pytest.mark.parametrize("name", on_cuda.CASES)
def test_it_trains(name):
    step, batch, _ = on_cuda.make(name, on_cuda.Way("eager"), True, "cpu")
    losses = [float(step(*batch)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
