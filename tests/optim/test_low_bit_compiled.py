"""Captured updates with moments in few bits that no kernel goes through: CAME's, those of parameters that are not
contiguous, and a user's own. Inductor gets through them, and they store eager's codes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt_compile as memopt
from memopt_compile.costs import workspace_bytes
from memopt_compile.optim import slabs
from memopt_compile.optim.base import Optimizer
from memopt_compile.quantization.operators import (
    DECODE,
    QUANTIZE,
    decode_moment,
    quantize,
    whole_moment,
)

optim = memopt.optim


class SignSGD(Optimizer):
    """That of docs/optimizers.md."""

    elementwise = True
    required = frozenset({"lr", "momentum"})
    state_names = frozenset({"buffer"})
    moments = {"buffer": True}

    def __init__(self, params, lr, momentum=0.9, **options):
        super().__init__(params, options, lr=lr, momentum=momentum, weight_decay=0.0)

    def new_state(self, p, group):
        return {"buffer": torch.zeros_like(p)}

    def update(self, p, grad, state, group):
        state["buffer"].lerp_(grad, 1 - group["momentum"])
        p.sub_(state["buffer"].sign() * self.rate(group))


def linear():
    return nn.Linear(64, 64, bias=False, dtype=torch.float64)


def convolution():
    return nn.Sequential(nn.Unflatten(1, (16, 2, 2)), nn.Conv2d(16, 256, 1, dtype=torch.float64))


def channels_last():
    return convolution().to(memory_format=torch.channels_last)


CASES = {
    "CAME 8": (linear, lambda p: optim.CAME(p, lr=0.01, state_bits=8)),
    "CAME 4": (linear, lambda p: optim.CAME(p, lr=0.01, state_bits=4)),
    "CAME 1": (linear, lambda p: optim.CAME(p, lr=0.01, state_bits=1)),
    "CAME auto": (convolution, lambda p: optim.CAME(p, lr=0.01, state_bits=8, factor_dims="auto")),
    "CAME dims": (convolution, lambda p: optim.CAME(p, lr=0.01, state_bits=8, factor_dims=(0, 1))),
    "CAME channels last": (channels_last, lambda p: optim.CAME(p, lr=0.01, state_bits=8, factor_dims=(0, 1))),
    "channels last": (channels_last, lambda p: optim.AdamW(p, lr=0.01, state_bits=8)),
    "own": (linear, lambda p: SignSGD(p, lr=0.01, state_bits=8)),
}


def train(case, **options):
    """Parameters and states after three steps, of two micro-batches if the optimizer takes them."""
    model, make = CASES[case]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = model()
    opt = make(model.parameters())

    def step(x):
        if isinstance(opt, optim.CAME):
            for some, in memopt.micro_batches(2, x):
                (model(some).square().mean() / 2).backward()
                opt.accumulate()
        else:
            model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    run = memopt.compile(step, **options) if options else step
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        run(torch.randn(4, 64, generator=generator, dtype=torch.float64))
    if options:
        assert memopt.report(run).kind == "step"
    return [*model.parameters(), *(s for p in model.parameters() for _, s in sorted(opt.state[p].items())
                                   if isinstance(s, torch.Tensor))]


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.table(4)
def test_equals_eager(case, lowering):
    for got, expected in zip(train(case, lowering=lowering), train(case), strict=True):
        if expected.dtype == torch.uint8:
            assert torch.equal(got, expected)
        else:
            assert torch.allclose(got, expected, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("weight_bits", [16, 24])
@pytest.mark.table(4)
def test_came_holds_a_gradient_and_slabs(monkeypatch, weight_bits):
    monkeypatch.setattr(slabs, "ELEMENTS", 1 << 12)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))).bfloat16()
    opt = optim.CAME(model.parameters(), lr=0.01, state_bits=8, weight_bits=weight_bits, micro_batches=2)

    def step(x):
        for some, in memopt.micro_batches(2, x):
            (model(some).float().square().mean() / 2).backward()
            opt.accumulate()
        opt.step()

    run = memopt.compile(step, lowering="eager")
    for _ in range(2):
        run(torch.randn(2, 512).bfloat16())
    found, rows = memopt.report(run), torch.empty(2, 512).bfloat16()
    # A CPU that does not multiply bfloat16 itself has the gradient in float32 first.
    product = workspace_bytes(torch.ops.aten.mm.default, (rows.t(), rows), {})
    assert found.measured_peak_bytes - found.resident_bytes <= 2 * 512**2 + max(product + 2**13, 16 * 4 * slabs.ELEMENTS)
    assert found.predicted_peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", [("signed", 8, 256), ("unsigned", 8, 256), ("signed", 4, 128), ("unsigned", 4, 128)])
def test_decoding_a_slab_at_a_time(form, dtype):
    """More than two slabs, the last block not whole: what arithmetic gives in one go, and what its fake says."""
    count = 70001
    value = torch.rand(count) - (0.5 if form[0] == "signed" else 0)
    codes, scales = quantize(value, torch.zeros(()), *form, None)
    made = decode_moment(codes, scales, *form, count, dtype)
    assert made.dtype == dtype and torch.equal(made, whole_moment(codes, scales, *form, count, dtype))
    checks = ("test_schema", "test_faketensor")  # the sizes of parameters are known
    torch.library.opcheck(DECODE, (codes, scales, *form, count, dtype), test_utils=checks)
    torch.library.opcheck(QUANTIZE, (value, torch.zeros(()), *form, None), test_utils=checks)


def test_what_folding_a_large_gradient_holds_is_predicted():
    """Its operator is given no parameter, but for the shape and where it is, which decide how large slabs are."""
    model = torch.nn.Linear(2048, 1024, bias=False)
    opt = memopt.optim.AdamA(model.parameters(), state_bits=8)

    def step(x):
        for (part,) in memopt.micro_batches(2, x):
            model(part).square().mean().backward()
            opt.accumulate()
        opt.step()

    run, x = memopt.compile(step, lowering="eager"), torch.randn(4, 2048)
    for _ in range(2):
        run(x)
    assert memopt.report(run).predicted_peak_bytes == memopt.report(run).measured_peak_bytes
