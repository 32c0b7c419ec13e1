"""Losses of [batch, classes, tokens], as of images."""

import pytest
import torch
import torch.nn.functional as F
from test_chunk_logits import VOCABULARY, chunk, loss_layer, refusal

from memopt_compile.metadata import check_metadata
from memopt_compile.row_classes import classes_last

SHAPE = (4, 6)


def transposed(logits, y, **settings):
    return F.cross_entropy(logits.transpose(1, 2), y, **settings)


def test_golden():
    step = classes_last(loss_layer(transposed, shape=(2, 3)))
    step.verify()
    check_metadata(step)
    assert step.text() == """\
p0: f64[50, 4]  # parameter trained
p1: f64[50]  # parameter trained
x0: f64[2, 3, 4]  # batch
x1: i64[2, 3]  # batch
forward:
  tanh_0: f64[2, 3, 4] = tanh(x0)
  t_0: f64[4, 50] = t(p0)
  view_0: f64[6, 4] = view(tanh_0, [6, 4])
  mm_0: f64[6, 50] = mm(view_0, t_0)
  log_softmax_0: f64[6, 50] = _log_softmax(mm_0, 1, False)
  view_1: i64[2, 1, 3] = view(x1, [2, 1, -1])
  view_2: i64[6] = view(view_1, [-1])
  nll_loss_forward_0: 2 values = nll_loss_forward(log_softmax_0, view_2, None, 1, -100)
  getitem_0: f64[] = getitem(nll_loss_forward_0, 0)
  getitem_1: f64[] = getitem(nll_loss_forward_0, 1)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  view_3: i64[6] = view(view_1, [-1])
  nll_loss_backward_0: f64[6, 50] = nll_loss_backward(full_0, log_softmax_0, view_3, None, 1, -100, getitem_1)
  log_softmax_backward_data_0: f64[6, 50] = _log_softmax_backward_data(nll_loss_backward_0, log_softmax_0, 1, torch.float64)
  view_4: f64[2, 3, 50] = view(log_softmax_backward_data_0, [2, 3, 50])
  clone_0: f64[2, 3, 50] = clone(view_4, memory_format=torch.contiguous_format)
  view_5: f64[6, 50] = view(clone_0, [6, 50])
  t_1: f64[50, 6] = t(view_5)
  mm_1: f64[50, 4] = mm(t_1, view_0)
  mm_2: f64[6, 4] = mm(view_5, p0)
  view_6: f64[2, 3, 4] = view(mm_2, [2, 3, 4])
  cos_0: f64[2, 3, 4] = cos(view_6)
return getitem_0, cos_0, mm_1
"""


@pytest.mark.parametrize("loss_of", [
    transposed,
    lambda logits, y: F.cross_entropy(logits.permute(0, 2, 1), y, reduction="sum"),
    lambda logits, y: (transposed(logits, y, reduction="none") * torch.arange(6)).mean(),
    lambda logits, y: transposed(torch.tanh(logits / 5) * 5, y),
    lambda logits, y: transposed(logits[:, :-1], y[:, 1:]),
    lambda logits, y: transposed(logits[:, :-1].contiguous(), y[:, 1:].contiguous(), weight=torch.ones(VOCABULARY).double() / 3),
    lambda logits, y: F.cross_entropy(logits.unflatten(1, (2, 3)).movedim(-1, 1), y.unflatten(1, (2, 3))),
    lambda logits, y: F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), y),
    lambda logits, y: F.cross_entropy(logits.transpose(1, 2).contiguous(), y),
], ids=["mean", "sum", "none", "capped", "shifted", "weighted", "of images", "by hand", "copied"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_parts_of_the_rows(loss_of, bias):
    before, after = chunk(loss_layer(loss_of, shape=SHAPE, bias=bias), ignored=True)
    assert after < 0.8 * before


def test_classes_of_images_that_lie_in_the_middle_stay():
    """What a convolution makes is no row of a product."""
    step = loss_layer(lambda logits, y: F.cross_entropy((logits * 2).transpose(1, 2).cumsum(2), y), shape=SHAPE)
    assert "all rows" in refusal(step)


def test_nothing_to_do():
    step = loss_layer(shape=(12,))
    text = step.text()
    assert classes_last(step).text() == text
