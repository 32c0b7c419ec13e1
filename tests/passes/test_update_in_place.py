"""Codes are written where they are, unless somebody still reads what was there."""

import pytest
import torch
from graphs import adama, captured, check, mlp, training_step

import memopt_compile as memopt
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.passes.update_in_place import UpdateInPlace
from memopt_compile.passes.write_back_early import WriteBackEarly

BEFORE = (Canonicalize(), WriteBackEarly(), ReleaseGradients(), ScheduleForPeak())


def folding(n, layers=1, **settings):
    """A captured step of layers of 64 by 64, before the pass."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(layers)))
    found = adama(model, torch.randn(4 * n, 64), n, lr=0.1, state_bits=8, **settings)
    for each in BEFORE:
        each.run(found)
    return found


def test_golden():
    step = folding(2)
    check(step, UpdateInPlace())
    lines = [line.split(", AdamA")[0] for line in step.text().splitlines()]
    assert "\n".join(line for line in lines if "quantized" in line or "copy_" in line) == """\
  copy_0: f32[] = copy_(s0, add_0)
  quantized_update_0: NoneType = quantized_update_([], [mm_1], [s1, s2, s3, s4]
  copy_1: u8[4096] = copy_(s1, s1)
  copy_2: u8[4096] = copy_(s2, s2)
  copy_3: f32[16] = copy_(s3, s3)
  copy_4: f32[16] = copy_(s4, s4)
  quantized_update_1: NoneType = quantized_update_([], [mm_3], [copy_1, copy_2, copy_3, copy_4]
  copy_5: u8[4096] = copy_(copy_1, copy_1)
  copy_6: u8[4096] = copy_(copy_2, copy_2)
  copy_7: f32[16] = copy_(copy_3, copy_3)
  copy_8: f32[16] = copy_(copy_4, copy_4)
  quantized_update_2: NoneType = quantized_update_([p0], [], [copy_5, copy_6, copy_7, copy_8]"""


@pytest.mark.parametrize("settings", [{"micro_batches": 3}, {"amsgrad": True}], ids=str)
def test_bit_by_bit_and_the_peak_falls(settings):
    step = folding(3, layers=3, **settings)
    before, after = check(step, UpdateInPlace())
    assert after < before and "quantized_update" not in step.op_counts()


def test_nothing_to_do():
    step = training_step(mlp(2), micro_batches=2)
    text = step.text()
    UpdateInPlace().run(step)
    assert step.text() == text


def test_result_that_is_read_behind_its_write():
    """The layers' new weights are used in the same step, as those of a discriminator are."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    opt = memopt.optim.AdamW(model.parameters(), lr=0.1, state_bits=8, weight_bits=16)

    def train(x):
        for _ in range(2):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return model(x).detach()

    step = captured(train, torch.randn(4, 64))
    for each in BEFORE:
        each.run(step)
    check(step, UpdateInPlace())
    assert step.op_counts()["quantized_update_"] == 4 and "quantized_update" not in step.op_counts()


def test_left_alone_where_the_old_value_is_wanted():
    model = torch.nn.Linear(64, 64, bias=False)
    opt = memopt.optim.AdamW(model.parameters(), state_bits=8)

    def train(x):
        old = model.weight.detach().clone()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model.weight.copy_(torch.where(loss < 1, model.weight, old))
        return loss

    step = captured(train, torch.randn(4, 64))
    for each in BEFORE:
        each.run(step)
    UpdateInPlace().run(step)
    assert step.op_counts()["quantized_update"] == 1


def squares(given, of_itself=False):
    """The operators of a step that makes an average of squares in an array of its own, and returns `given` of both."""
    p = torch.nn.Parameter(torch.randn(64))
    opt = torch.optim.SGD([p], lr=0.1)
    keys = "factor_dims=None betas betas betas eps eps micro_batches maximize state_bits rows ranks"

    def train(x):
        (x * p).square().sum().backward()
        made = torch.zeros_like(p)
        new, = torch.ops.memopt.quantized_update(
            [], [made if of_itself else p.grad], [made], "CAME _average_squares", "exp_avg_sq", keys,
            [0.9, 0.99, 0.999, 1e-30, 1e-16, 1, 0, 32, 64, 1], [], [0, 0, -1, 0, *p.shape], p.dtype)
        opt.step()
        opt.zero_grad()
        return given(made, new)

    step = captured(train, torch.randn(64))
    check(step, UpdateInPlace())
    return step.op_counts()


def test_result_takes_the_place_of_what_nothing_else_reads():
    assert "quantized_update" not in squares(lambda made, new: new * 2)


@pytest.mark.parametrize("given", [lambda made, new: new + made, lambda made, new: (made, new * 2)])
def test_not_of_what_is_read_later(given):
    assert squares(given)["quantized_update"] == 1


def test_not_of_what_the_operator_reads():
    assert squares(lambda made, new: new * 2, of_itself=True)["quantized_update"] == 1
