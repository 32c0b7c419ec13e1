"""Moments of 16 bits: bfloat16 rounded at random, the same wherever and however often it is run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import difference, give_gradients, parameters, saved_and_loaded, states, train

from memopt_compile import optim
from memopt_compile.quantization.rounding import ROUNDS, Rounded, noise, rounded

seeds = st.integers(0, 2**32 - 1)
steps = st.integers(1, 10**7)
values = st.floats(-(2.0**99), 2.0**99, width=32)
COUNT = 1 << 16


def neighbours(value):
    """The numbers of bfloat16 around one of float32, the nearer to 0 first."""
    bits = torch.tensor([value], dtype=torch.float32).view(torch.int32) & -(1 << 16)
    return bits.view(torch.float32), (bits + (1 << 16)).view(torch.float32)


@given(value=values, seed=seeds, step=steps)
def test_one_of_the_two_neighbours_and_right_in_the_mean(value, seed, step):
    """The share that is rounded up is within six standard deviations of the exact one."""
    low, high = neighbours(value)
    got = rounded(torch.full((COUNT,), value), Rounded(seed), step).float()
    assert ((got == low) | (got == high)).all()
    share = float((value - low.double()) / (high.double() - low.double()))
    up = int((got == high).sum())
    assert abs(up - COUNT * share) <= 6 * (COUNT * share * (1 - share)) ** 0.5 + 1e-9


@given(seed=seeds, places=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=1))
def test_right_in_the_mean_of_many_steps(seed, places):
    place = torch.tensor(places, dtype=torch.int32)
    draws = torch.cat([noise(place, seed, step) for step in range(1, 2001)]).double()
    assert abs(float(draws.mean()) - 32767.5) <= 6 * 65536 / 12**0.5 / 2000**0.5


@given(seed=seeds, step=steps, first=st.integers(0, 2**30))
def test_noise_is_uniform_and_of_its_own_in_each_step(seed, step, first):
    places = torch.arange(first, first + COUNT, dtype=torch.int32)
    draws, following = (noise(places, seed, s) for s in (step, step + 1))
    assert draws.min() >= 0 and draws.max() < 1 << 16
    for bit in range(16):
        assert abs(int((draws >> bit & 1).sum()) - COUNT / 2) <= 6 * COUNT**0.5 / 2
    for other in (following, draws.roll(1), noise(places, seed ^ 1, step), noise(places, seed ^ 1 << 16, step)):
        pair = torch.stack([draws, other]).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) <= 6 / COUNT**0.5


def test_no_product_overflows():
    assert all((1 << 16) * multiplier <= 1 << 31 and multiplier % 2 for multiplier, _, _ in ROUNDS)


@given(value=values, seed=seeds, step=steps)
def test_what_bfloat16_has_stays(value, seed, step):
    exact = torch.tensor([value, 0.0, -0.0, float("inf"), -float("inf")]).bfloat16()
    assert torch.equal(rounded(exact.float(), Rounded(seed), step), exact)
    assert rounded(torch.tensor([float("nan")]), Rounded(seed), step).isnan().all()


@given(cut=st.integers(0, 999), seed=seeds, step=steps)
def test_parts_are_those_of_the_whole(cut, seed, step):
    x, form = torch.randn(1000), Rounded(seed)
    parts = [rounded(x[:cut], form, step), rounded(x[cut:], form, step, cut)]
    assert torch.equal(torch.cat(parts), rounded(x, form, torch.tensor(step)))


def test_follows_a_mean_that_nearest_rounding_never_reaches():
    p = torch.nn.Parameter(torch.zeros(1 << 14))
    p.grad = torch.ones_like(p)
    opt = optim.SGD([p], lr=0.0, momentum=0.999, dampening=0.999, state_bits=16)
    for _ in range(2000):
        p.grad.fill_(1.0 if opt.state else 0.0)
        opt.step()
    got = float(opt.state[p]["momentum_buffer"].double().mean())
    assert got == pytest.approx(1 - 0.999**1999, abs=2e-3)
    nearest = torch.tensor(0.0).bfloat16()
    for _ in range(1999):
        nearest = nearest.lerp(torch.ones_like(nearest), 0.001)
    assert nearest < 0.6


@pytest.mark.parametrize("make", [
    lambda p, **kw: optim.SGD(p, lr=0.1, momentum=0.9, state_bits=16, **kw),
    lambda p, **kw: optim.CAME(p, lr=0.02, state_bits=16, **kw),
    lambda p, **kw: optim.AdamW(p, lr=0.02, state_bits=16, **kw)])
def test_goes_on_bit_by_bit_with_the_seed_of_the_checkpoint(make):
    shapes = [(80, 60), (9, 1000)]
    ps, old = train(lambda p: make(p, rounding_seed=3), shapes=shapes, dtype=torch.float32)
    _, other = train(make, shapes=shapes, dtype=torch.float32)
    assert difference(states(old), states(other)) > 0
    copies, new = saved_and_loaded(ps, old, make)
    train(lambda _: old, 3, ps=ps)
    train(lambda _: new, 3, ps=copies)
    assert difference(ps, copies) == 0 == difference(states(old), states(new))


def test_no_state_without_a_moment():
    ps = parameters([(80, 60)])
    opt = optim.SGD(ps, lr=0.1, state_bits=16)
    give_gradients(ps, 0)
    opt.step()
    assert not opt.state[ps[0]]
