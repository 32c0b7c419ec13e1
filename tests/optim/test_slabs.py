"""A step holds little beside its state, however large the tensor, and the same comes out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import MAKERS, difference, give_gradients, states, train

from memopt_compile.measure import measure
from memopt_compile.optim import slabs

every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, elements=st.integers(1, 40))
def test_slabs_cover_the_tensor_once(shape, elements):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "ELEMENTS", elements)
        count = torch.zeros(shape)
        for slab in slabs.slabs(torch.empty(shape)):
            part = slabs.cut(count, slab)
            part += 1
            longest = max(shape)
            assert part.numel() <= max(elements, count.numel() // longest)
        assert (count == 1).all()


def test_dimension_that_broadcasts_stays():
    slab = slabs.Slab(0, 2, 3)
    assert slabs.cut(torch.zeros(1, 4), slab).shape == (1, 4)
    assert slabs.cut(torch.zeros(()), slab).shape == ()


@every
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (30,), (3, 2, 5, 2), (2, 7, 3), (12, 3, 2)])
def test_slabs_change_nothing_but_rounding(make, shape, monkeypatch):
    whole, one = train(make, shapes=[shape])
    monkeypatch.setattr(slabs, "ELEMENTS", 5)
    parts, other = train(make, shapes=[shape])
    assert difference(whole, parts) <= 1e-12
    assert difference(states(one), states(other)) <= 1e-12


@every
@pytest.mark.parametrize("shape", [(64, 64, 4, 4), (2, 1 << 15)])
def test_temporaries_of_large_tensors(make, shape, monkeypatch):
    """Four arrays of a slab at most, not of the parameter: here 16 times as large."""
    monkeypatch.setattr(slabs, "ELEMENTS", 1 << 12)
    _, opt = train(make, 1, shapes=[shape])
    give_gradients(opt.param_groups[0]["params"], 0)
    assert measure(opt.step).transient_peak_bytes <= 4 * 8 * slabs.ELEMENTS


def test_four_slabs_of_the_widest_type_are_within_the_bound():
    assert 4 * 8 * slabs.ELEMENTS <= 32 * 2**20
