"""A step of ZeRO through Inductor: collectives keep their order there, and writes stay behind waits."""

from __future__ import annotations

from functools import partial
from unittest import mock

import cases
import pytest
import torch
from ranks import on_ranks
from torch import nn

from memopt_compile import pipelines
from memopt_compile.passes.place_in_arena import PlaceInArena


def small() -> nn.Module:
    """Both biases are small enough to travel together."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def both(rank, ranks):
    found = {lowering: cases.trained(rank, ranks, 3, small, torch.float64, lowering=lowering)
             for lowering in ("inductor", "eager")}
    with mock.patch.object(pipelines, "PlaceInArena", partial(PlaceInArena, rise=9.0)):  # for everything
        return found | {"arena": cases.trained(rank, ranks, 3, small, torch.float64, lowering="inductor", arena=True,
                                               measured=10)}


@pytest.mark.inductor
def test_inductor_gives_the_numbers_of_one_process(tmp_path):
    expected, found = cases.alone(small, 2, cases.sgd), on_ranks(2, tmp_path, both, 2)
    assert min(min(rank["arena"]["measured"]) - rank["arena"]["predicted"] for rank in found) == 0
    for rank in found:
        assert rank["inductor"]["kind"] == "step"
        assert rank["inductor"]["calls"] == rank["eager"]["calls"]
        assert {"all_gather_into_tensor_coalesced",
                "reduce_scatter_tensor_coalesced"} <= set(rank["inductor"]["calls"])
        for name, value in expected["parameters"].items():
            assert float((rank["inductor"]["parameters"][name] - value).abs().max()) <= 1e-11
            # With an arena collectives, and the products that are gradients, run between smaller pieces.
            assert float((rank["arena"]["parameters"][name] - value).abs().max()) <= 1e-11
        assert "mm.out" in rank["arena"]["counts"] and rank["arena"]["arena"].nbytes > 0
