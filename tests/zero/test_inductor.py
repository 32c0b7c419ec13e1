"""A step of ZeRO through Inductor: collectives keep their order there, and writes stay behind waits."""

from __future__ import annotations

import cases
import pytest
import torch
from ranks import on_ranks
from torch import nn


def small() -> nn.Module:
    """Both biases are small enough to travel together."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def both(rank, ranks):
    return {lowering: cases.trained(rank, ranks, 3, small, torch.float64, lowering=lowering)
            for lowering in ("inductor", "eager")}


@pytest.mark.inductor
def test_inductor_gives_the_numbers_of_one_process(tmp_path):
    expected = cases.alone(small, 2, cases.sgd)
    for rank in on_ranks(2, tmp_path, both, 2):
        assert rank["inductor"]["kind"] == "step"
        assert rank["inductor"]["calls"] == rank["eager"]["calls"]
        assert {"all_gather_into_tensor_coalesced",
                "reduce_scatter_tensor_coalesced"} <= set(rank["inductor"]["calls"])
        for name, value in expected["parameters"].items():
            assert float((rank["inductor"]["parameters"][name] - value).abs().max()) <= 1e-11
