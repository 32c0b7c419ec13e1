"""Linear formats: packing, error bounds, and rounding that is the number itself in the mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt_compile.quantization import arithmetic, linear, operators, rounding
from memopt_compile.quantization.formats import Linear
from memopt_compile.quantization.named import LINEAR, moment

MOMENTS = [moment(bits, signed) for bits in (8, 4) for signed in (True, False)]
widths = pytest.mark.parametrize("bits", LINEAR)
counts = st.one_of(st.integers(1, 20), st.sampled_from([2047, 2048, 2049, 4099]))


def values(count, seed=0, scale=1.0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


@widths
@given(count=counts, seed=st.integers(0, 99))
def test_packing_gives_the_codes_back(bits, count, seed):
    generator = torch.Generator().manual_seed(seed)
    most = 2 ** (bits - 1)
    codes = torch.randint(-most, most, (count,), generator=generator, dtype=torch.int32)
    planes = linear.planes_of(codes, bits)
    assert torch.equal(linear.codes_of(planes, bits, count), codes)
    assert sum(plane.numel() for plane in planes) == LINEAR[bits].sizes(count)[0]


@pytest.mark.parametrize(("bits", "count", "wanted"), [
    (12, 2, 3), (10, 4, 5), (8, 7, 7), (12, 2047, 3071), (10, 2047, 2559), (12, 1, 2)])
def test_bytes_are_those_of_the_bits(bits, count, wanted):
    assert LINEAR[bits].sizes(count) == (wanted, 1)


@widths
@given(count=counts, seed=st.integers(0, 99), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e9]),
       stochastic=st.booleans())
def test_error_is_within_one_step_and_the_largest_is_exact(bits, count, seed, scale, stochastic):
    form = LINEAR[bits]._replace(seed=seed if stochastic else None)
    x = values(count, seed, scale)
    parts = linear.encode(x, form, draws=seed)
    assert [part.numel() for part in parts] == form.part_sizes(count)
    got = linear.decode(parts, form, count)
    for start in range(0, count, form.block):
        group, decoded = x[start:start + form.block], got[start:start + form.block]
        step = float(group.abs().max()) / form.largest
        most = (1.0 if stochastic else 0.5) * step * 1.0001 + 1e-45
        assert (decoded - group).abs().max() <= most
        largest = group.abs().argmax()
        assert decoded[largest] == group[largest]


@widths
@given(count=counts, seed=st.integers(0, 999), scale=st.sampled_from([1e-20, 0.3, 7e6]))
def test_what_was_decoded_is_encoded_to_the_same(bits, count, seed, scale):
    form = LINEAR[bits]._replace(seed=seed)
    parts = linear.encode(values(count, seed, scale), form, draws=1)
    again = linear.encode(linear.decode(parts, form, count), form, draws=2)
    assert all(torch.equal(a, b) for a, b in zip(parts, again))


def points_of(form):
    if form.map == "linear":
        return torch.arange(-form.largest, form.largest + 1) / form.largest
    return arithmetic.of_numbers(torch.arange(2**form.bits, dtype=torch.uint8), form, torch.float32)


@pytest.mark.parametrize("form", [*LINEAR.values(), *MOMENTS], ids=lambda f: f"{f.map}{f.bits}")
@pytest.mark.parametrize("x", [0.7713, 0.0317, 0.00412, -0.9997])
def test_mean_over_all_draws_is_the_number(form, x):
    """E[Q(x)] = x, over each of the 2^16 numbers that may be drawn, not a sample of them."""
    shares = torch.full((1 << 16,), x)
    drawn = torch.arange(1 << 16, dtype=torch.int32)
    points = points_of(form)
    nearest = (points - x).abs().argmin()
    other = nearest + (1 if points[nearest] < x else -1)
    near, far = points[nearest].expand_as(shares), points[other.clamp(0, len(points) - 1)].expand_as(shares)
    mean = torch.where(rounding.moves(shares, near, far, drawn), far, near).double().mean()
    if x < points[0]:
        assert form.map != "linear" and mean == points[0].double()  # below the least point there is none to go to
    else:
        assert abs(mean - shares[0].double()) <= 2**-16 * abs(points[other] - points[nearest]) + 1e-9


@pytest.mark.parametrize("form", [*LINEAR.values(), moment(8, True), moment(8, False), moment(4, True)],
                         ids=lambda f: f"{f.map}{f.bits}")
def test_mean_of_many_writes_is_the_number(form):
    """Through the whole encoder, with the hash that draws: as near as so many samples can be."""
    form = form._replace(seed=5)
    x = values(400).abs().clamp(max=1.0)
    x[0] = 1.0
    samples = torch.stack([operators.decode(operators.encode(x, form, draws), form, 400)
                           for draws in range(1, 401)]).double()
    error, below = (samples.mean(0) - x).abs(), points_of(form).double()
    place = torch.searchsorted(below, x.double()).clamp(1, len(below) - 1)
    apart = below[place] - below[place - 1]
    assert (error <= 5 * apart * 0.5 / 20 + 1e-6).all()  # the spread of a mean of 400 is a 20th
    nearest = form._replace(seed=None)
    biased = (operators.decode(operators.encode(x, nearest), nearest, 400) - x).abs()
    assert error.mean() < biased.mean() / 3


@pytest.mark.parametrize("form", [Linear(12, seed=3), Linear(10, 96, seed=3), moment(8, True)._replace(
    block=2048, seed=3)], ids=str)
def test_slabs_give_what_the_whole_does(form):
    x, draws = values(70_001), torch.tensor(9)
    parts = operators.quantize(x, draws, form.map, form.bits, form.block, form.seed)
    whole = operators.encode(x, form, draws)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole))
    back = operators.dequantize(parts, form.map, form.bits, form.block, [70_001], torch.float32)
    assert torch.equal(back, operators.decode(whole, form, 70_001))
    assert torch.equal(back, operators.whole_value(whole, form.map, form.bits, form.block, [70_001],
                                                   torch.float32))


@widths
def test_zeros_and_what_is_not_finite(bits):
    form = LINEAR[bits]._replace(block=8, seed=1)
    x = torch.zeros(24)
    x[3], x[17] = float("inf"), float("nan")
    got = linear.decode(linear.encode(x, form), form, 24)
    assert got[:8].isnan().all() and not got[8:16].any() and got[16:].isnan().all()


def test_other_draws_round_otherwise_and_equal_ones_alike():
    x = values(5000)
    one, same, other, seed = (linear.encode(x, Linear(8, seed=s), d)[0]
                              for s, d in ((1, 1), (1, 1), (1, 2), (2, 1)))
    assert torch.equal(one, same)
    for changed in (other, seed):
        assert 0.1 < (one != changed).double().mean() < 0.9
