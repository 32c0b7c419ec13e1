"""A few cases of each set; `python tests/coverage/run.py` runs them all."""

from __future__ import annotations

import check
import module_cases
import optimizer_cases
import pytest
import torch

MODULES = {case.name: case for case in module_cases.cases()}
OPTIMIZERS = {case.name: case for case in optimizer_cases.cases()}


def right_and_whole(case: check.Case) -> check.Row:
    row = check.run(case)
    assert not row.error
    assert row.right, (row.difference, row.where)
    assert row.whole, row.reasons
    return row


# gpt2 says something once in its first forward.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2"])
def test_architecture(name):
    pytest.importorskip("transformers")
    import models

    row = right_and_whole(next(case for case in models.cases() if case.name == name))
    assert row.peak <= row.eager_peak
    assert abs(row.prediction_error) <= 0.01


# Adafactor reads numbers from tensors, fused updates may not be traced, foreach ones need every
# gradient at once.
@pytest.mark.parametrize("name", ["Adafactor: default", "AdamW: fused", "ASGD: foreach",
                                  "NAdam: foreach"])
def test_optimizer(name):
    row = right_and_whole(OPTIMIZERS[name])
    assert row.peak <= row.eager_peak


@pytest.mark.parametrize("name", ["nn.BatchNorm1d", "nn.Embedding", "nn.KLDivLoss", "nn.CircularPad1d",
                                  "nn.TransformerEncoder (9)"])
@pytest.mark.table(8)
def test_module(name):
    row = right_and_whole(MODULES[name])
    assert row.peak <= row.eager_peak
    assert abs(row.prediction_error) <= 0.01


def test_ordinary_path_is_right_and_said():
    row = check.run(OPTIMIZERS["LBFGS: default"])
    assert row.right and not row.whole and row.said
    assert row.peak <= row.eager_peak


def test_wrong_numbers_are_seen():
    assert check.largest_difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.1])])[0] > 0.04
    assert check.largest_difference({"a": 1}, {"a": 2}) == (float("inf"), ".a")
    nan = torch.tensor([1.0, float("nan")])
    assert check.largest_difference(nan, nan.clone())[0] == 0.0
    assert check.largest_difference(nan, torch.tensor([1.0, 2.0]))[0] == float("inf")
