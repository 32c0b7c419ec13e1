"""Moments kept as signs and the row and column means of blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt_compile.quantization.factored import SIDE
from memopt_compile.quantization.formats import decode, encode
from memopt_compile.quantization.named import moment

BLOCK = SIDE * SIDE
both = pytest.mark.parametrize("signed", [True, False])


def values(count: int, signed: bool, seed: int) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return x if signed else x.square()


def kept(x: torch.Tensor, signed: bool) -> torch.Tensor:
    form = moment(1, signed)
    codes, means = encode(x, form)
    assert [codes.numel(), means.numel()] == form.part_sizes(x.numel())
    return decode(codes, means, form, x.numel(), x.dtype)


@both
@given(count=st.integers(0, 3 * BLOCK), seed=st.integers(0, 99), scale=st.sampled_from([1e-12, 1.0, 1e9]))
def test_signs_and_the_sum_of_each_block(signed, count, seed, scale):
    """The sum of a block whose last row is not full to within that row's share."""
    x = values(count, signed, seed) * scale
    y = kept(x, signed)
    assert torch.equal(x.sign(), y.sign())
    for first in range(0, count, BLOCK):
        here, there = (t[first:first + BLOCK].abs().sum() for t in (x, y))
        rest = min(count - first, BLOCK) % SIDE
        assert there == pytest.approx(float(here), rel=0.5 if rest else 1e-5)


@both
@given(rows=st.integers(1, SIDE), seed=st.integers(0, 99))
def test_an_outer_product_is_kept(signed, rows, seed):
    draw = torch.Generator().manual_seed(seed)
    x = (torch.rand(rows, 1, generator=draw) * torch.rand(1, SIDE, generator=draw)).view(-1)
    if signed:
        x = x * (torch.rand(x.shape, generator=draw) - 0.5).sign()
    torch.testing.assert_close(kept(x, signed), x, rtol=1e-5, atol=0)


@both
def test_row_and_column_sums_are_adafactors(signed):
    x = values(BLOCK, signed, 1)
    sizes, got = x.abs().view(SIDE, SIDE), kept(x, signed).abs().view(SIDE, SIDE)
    wanted = sizes.mean(1, keepdim=True) * sizes.mean(0, keepdim=True) / sizes.mean()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)


@both
def test_zeros_stay_zeros(signed):
    assert not kept(torch.zeros(BLOCK + 5), signed).any()
