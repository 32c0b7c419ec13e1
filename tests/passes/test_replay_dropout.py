import itertools

import pytest
import torch
import torch.nn.functional as F
from graphs import check, training_step
from torch import nn

from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.replay_dropout import ReplayDropout


def step_with(p):
    torch.manual_seed(0)
    step = training_step(nn.Sequential(nn.Linear(32, 16), nn.Dropout(p), nn.Linear(16, 4)).double())
    Canonicalize().run(step)
    return step


def test_golden():
    step = step_with(0.25)
    check(step, ReplayDropout(0), slack=10**6)
    forward = step.text().split("forward:\n")[1].split("backward:")[0]
    assert forward == """\
  t_0: f64[32, 16] = t(p0)
  addmm_0: f64[4, 16] = addmm(p1, x0, t_0)
  empty_like_0: bool[4, 16] = empty_like(addmm_0, dtype=torch.bool)
  bernoulli_0: bool[4, 16] = bernoulli.p(empty_like_0, 0.75)
  mul_0: f64[4, 16] = mul(addmm_0, bernoulli_0)
  mul_1: f64[4, 16] = mul(mul_0, 1.3333333333333333)
  t_1: f64[16, 4] = t(p2)
  addmm_1: f64[4, 4] = addmm(p3, mul_1, t_1)
  log_softmax_0: f64[4, 4] = _log_softmax(addmm_1, 1, False)
  nll_loss_forward_0: 2 values = nll_loss_forward(log_softmax_0, x1, None, 1, -100)
  getitem_0: f64[] = getitem(nll_loss_forward_0, 0)
  getitem_1: f64[] = getitem(nll_loss_forward_0, 1)
"""


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_the_same_numbers(p):
    check(step_with(p), ReplayDropout(0), slack=10**6)  # bit for bit, from one seed


class Transposed(nn.Module):
    def __init__(self, order, dtype):
        super().__init__()
        self.inner, self.outer, self.order = nn.Linear(32, 60, dtype=dtype), nn.Linear(60, 4, dtype=dtype), order

    def forward(self, x):
        dims = self.inner(x.to(self.inner.weight.dtype)).unflatten(1, (3, 4, 5)).permute(self.order)
        back = [self.order.index(dim) for dim in range(4)]
        return self.outer(F.dropout(dims, 0.3).permute(back).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[1::4])
@pytest.mark.table(4)
def test_a_mask_is_drawn_in_the_order_of_memory(order, dtype):
    torch.manual_seed(0)
    step = training_step(Transposed(order, dtype))
    Canonicalize().run(step)
    assert "native_dropout" in step.text()
    check(step, ReplayDropout(0), slack=10**6)


def test_a_step_that_fits_is_left_alone():
    step = step_with(0.5)
    text = step.text()
    ReplayDropout(2**40).run(step)
    assert step.text() == text


def test_nothing_to_do():
    step = training_step(nn.Linear(32, 4).double())
    text = step.text()
    ReplayDropout(0).run(step)
    assert step.text() == text
