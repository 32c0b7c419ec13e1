"""Losses of each logit, not of a target's alone: the gradient of each is known by itself."""

import pytest
import torch
import torch.nn.functional as F
from test_chunk_logits import VOCABULARY, chunk, loss_layer, refusal, widest


def best(logits):
    """What a teacher says of the likeliest classes alone."""
    values, classes = logits.detach().topk(3)
    return -(logits.log_softmax(-1).gather(-1, classes) * values.softmax(-1)).sum(-1).mean()


@pytest.mark.parametrize("loss_of", [
    lambda z, y: F.mse_loss(z, z.detach().sin()), lambda z, y: F.mse_loss(z, z.detach().sin(), reduction="sum"),
    lambda z, y: F.huber_loss(z, z.detach().sin(), delta=0.3), lambda z, y: F.smooth_l1_loss(z, z.detach().sin()),
    lambda z, y: F.soft_margin_loss(z, z.detach().sign()),
    lambda z, y: F.binary_cross_entropy(z.sigmoid(), z.detach().cos().sigmoid()), lambda z, y: best(z),
    lambda z, y: (z.max(-1).values.exp() + z.sort(-1, descending=True).values[..., 1]).square().mean(),
    lambda z, y: (torch.ones(z.shape, dtype=z.dtype) - z.sigmoid()).square().mean()],
    ids=["mse", "sum", "huber", "smooth", "margin", "binary", "topk", "sort", "ones"])
def test_of_each_number(loss_of):
    step = loss_layer(loss_of, shape=(24,))
    before, after = chunk(step)
    assert after < 0.8 * before and widest(step) < 24 * VOCABULARY


def classes_of(z, y):
    return torch.zeros(z.shape, dtype=z.dtype).scatter(1, y[:, None], 1)


def test_a_target_is_transposed_where_there_are_as_many_rows_as_classes():
    """What is read by columns stays whole, with all that it is made of."""
    step = loss_layer(lambda z, y: (z.softmax(-1) - classes_of(z, y).t()).square().mean(), shape=(VOCABULARY,))
    before, after = chunk(step)
    assert after < before


def test_refuses_a_target_that_is_read_by_rows_and_by_columns():
    step = loss_layer(lambda z, y: (z.softmax(-1) - (w := classes_of(z, y)).t() + w).square().mean(), shape=(VOCABULARY,))
    assert "t reads all of what the loss is made of row by row" in refusal(step)
