"""Formats of activations: what comes back, in how many bytes, whole or a slab at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt_compile.compression import (
    compress,
    decompress,
    in_rows,
    is_dense,
    whole_parts,
    whole_value,
)
from memopt_compile.measure import measure
from memopt_compile.quantization.activations import Packing
from memopt_compile.quantization.named import FORMATS as ALL

FORMATS = {name: form for name, form in ALL.items() if isinstance(form, Packing)}
LOSSY = [name for name, form in FORMATS.items() if form.error]
FOUR_BITS = [name for name in LOSSY if "int4" in name]


def sample(form, shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    if "mask" in form:
        return value > 0
    if "index" in form:
        return (value.abs() * 50).clamp(max=200).to(torch.int64)
    if "offset" in form and value.numel():
        return value.softmax(-1).to(dtype)
    return value.to(dtype)


def layout(value, form):
    return form, list(value.shape), list(value.stride()), value.dtype


def error(value, back):
    return float((back.double() - value.double()).norm() / value.double().norm())


shapes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=30, deadline=None)
@given(shape=shapes, order=st.randoms(), dtype=st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_any_shape_and_layout(form, shape, order, dtype):
    """Shape, strides and type come back; lossless formats lose nothing; groups know their error."""
    dims = list(range(len(shape)))
    order.shuffle(dims)
    value = sample(form, shape, dtype).permute(dims)
    assert is_dense(value)
    back = decompress(compress(value, form), *layout(value, form))
    assert back.shape == value.shape and back.stride() == value.stride() and back.dtype == value.dtype
    if form == "1-bit sign":
        assert torch.equal(back > 0, value > 0) and back.unique().numel() <= 2
    elif not FORMATS[form].error:
        assert torch.equal(back, value)
    else:  # half a step of the coarsest group, or a whole one for the extreme's opposite
        steps = {"int8": 128, "fp8": 16}.get(form, 8)
        largest = value.float().abs().max()
        assert (back.float() - value.float()).abs().max() <= 1.02 * largest / steps + 1e-6


@pytest.mark.parametrize("form", FORMATS)
def test_slabs_give_what_the_whole_gives(form):
    for shape in ((300, 512), (37, 5, 333)):
        value = sample(form, shape)
        parts = compress(value, form)
        for a, b in zip(parts, whole_parts(value, form), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert torch.equal(decompress(parts, *layout(value, form)),
                           whole_value(parts, *layout(value, form)))


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_as_the_table_says(form, dtype):
    value = sample(form, (2048, 512), dtype)
    assert error(value, decompress(compress(value, form), *layout(value, form))) == pytest.approx(
        FORMATS[form].error, rel=0.06)


@pytest.mark.parametrize("form", FOUR_BITS)
def test_four_bits_cost_at_most_30_percent_of_bfloat16(form):
    for shape in ((1024, 768), (8, 128, 1024), (128, 4096)):
        value = sample(form, shape, torch.bfloat16)
        assert sum(p.nbytes for p in compress(value, form)) <= 0.30 * value.nbytes


def test_outliers_are_kept_exactly():
    """What one scale for each token cannot hold: a few channels a thousand times the others."""
    value = sample("int4", (512, 256))
    value[:, [3, 77, 200]] *= 1000
    back = decompress(compress(value, "int4 outliers"), *layout(value, "int4 outliers"))
    assert torch.equal(back[:, [3, 77, 200]], value[:, [3, 77, 200]])
    rest = [c for c in range(256) if c not in (3, 77, 200)]
    assert error(value[:, rest], back[:, rest]) < 0.11
    plain = decompress(compress(value, "int4"), *layout(value, "int4"))
    assert error(value[:, rest], plain[:, rest]) > 0.9


def test_outliers_in_every_channel():
    """There are no more columns kept than were counted; the rest is as good as its groups."""
    value = sample("int4", (512, 256)) * torch.logspace(0, 3, 512)[:, None]
    parts = compress(value, "int4 outliers")
    assert parts[0].numel() == 8 and sum(p.nbytes for p in parts) < 0.17 * value.nbytes
    assert error(value, decompress(parts, *layout(value, "int4 outliers"))) < 0.11


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_back_as_nan(form, bad):
    value = sample(form, (256, 256))
    value[130, 7] = bad
    back = decompress(compress(value, form), *layout(value, form))
    assert not back[130, 7].isfinite() and back[:128].isfinite().all()


@pytest.mark.parametrize("form", LOSSY)
def test_zeros_stay_zeros(form):
    value = torch.zeros(300, 64)
    assert torch.equal(decompress(compress(value, form), *layout(value, form)), value)


@pytest.mark.parametrize("form", [f for f in FORMATS if "index" not in f])
def test_little_is_held_beside(form):
    value = sample(form, (8192, 512))
    parts = compress(value, form)
    for run in (lambda: compress(value, form), lambda: decompress(parts, *layout(value, form))):
        run()
        seen = measure(run, resident=())
        assert seen.transient_peak_bytes - seen.end_bytes < 2**20


def test_columns_lie_along_the_innermost_dimension():
    value = torch.randn(4, 6, 8)
    assert in_rows(value).shape == (24, 8) and in_rows(value.permute(2, 0, 1)).shape == (24, 8)
    assert in_rows(value.view(24, 8, 1)).shape == (24, 8)


def test_only_a_tensor_with_each_element_once_is_dense():
    value = torch.randn(4, 6)
    assert is_dense(value) and is_dense(value.t())
    for other in (value[:, :3], torch.zeros(()), torch.zeros(1, 4).expand(3, 4)):
        assert not is_dense(other)


@pytest.mark.parametrize("form", LOSSY)
def test_the_largest_half_comes_back_finite(form):
    """Scales are rounded, and a rounded one times its code may be more than float16 can hold."""
    largest = torch.finfo(torch.float16).max
    value = torch.full((256, 256), largest, dtype=torch.float16)
    value[::2, 1::2] = -largest
    assert torch.isfinite(decompress(compress(value, form), *layout(value, form))).all()


def test_the_middle_of_large_numbers_is_finite():
    """Their sum is not, and the scale, 0, would not tell."""
    value = torch.full((4, 64), torch.finfo(torch.float32).max)
    assert torch.equal(decompress(compress(value, "int4 offset"), *layout(value, "int4 offset")), value)
