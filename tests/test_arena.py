"""Where tenants of an arena lie, over random lifetimes, and the memory that steps share."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt_compile.arena import (
    WINDOW,
    Buffer,
    Tenant,
    _met,
    _placed,
    buffer_of,
    lower_bound_bytes,
    place,
)

LIVES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 40), st.integers(0, 12)), max_size=40)


def tenants(lives):
    return [Tenant(f"t{i}", size, start, start + length) for i, (size, start, length) in enumerate(lives)]


def bytes_by_moment(given):
    return max((sum(t.nbytes for t in given if t.start <= moment <= t.stop) for moment in range(60)), default=0)


@given(LIVES, st.sampled_from([1, 64, 512]))
def test_no_two_that_are_there_at_once_share_a_byte(lives, alignment):
    wanted = tenants(lives)
    size, offsets = place(wanted, alignment)
    owner: dict[tuple[int, int], str] = {}  # by moment and block of `alignment` bytes: not by intervals again
    for tenant, offset in zip(wanted, offsets):
        assert offset % alignment == 0 and 0 <= offset and offset + tenant.nbytes <= size
        for moment in range(tenant.start, tenant.stop + 1):
            for block in range(offset // alignment, -(-(offset + tenant.nbytes) // alignment)):
                assert owner.setdefault((moment, block), tenant.name) == tenant.name


@given(LIVES)
def test_no_buffer_is_smaller_than_what_is_needed_at_once(lives):
    wanted = tenants(lives)
    least = lower_bound_bytes(wanted)
    assert least == bytes_by_moment(wanted)
    size, _ = place(wanted, 1)
    assert least <= size <= sum(t.nbytes for t in wanted)
    assert place(wanted, 1) == place(wanted, 1)


@given(LIVES, st.integers(0, 20000))
def test_what_finds_no_place_stays_outside(lives, capacity):
    wanted = tenants(lives)
    size, offsets = place(wanted, 64, capacity)
    assert size <= capacity
    inside = [replace(t, offset=offset) for t, offset in zip(wanted, offsets) if offset is not None]
    for i, one in enumerate(inside):
        assert not any(one.meets(other) and one.overlaps(other) for other in inside[:i])
    for tenant, offset in zip(wanted, offsets):  # and for one of those outside there is no gap at the start
        if offset is None and tenant.nbytes <= capacity:
            assert any(tenant.meets(other) and tenant.overlaps(other) for other in inside)


def test_what_follows_each_other_shares_bytes():
    size, offsets = place([Tenant("a", 100, 0, 3), Tenant("b", 100, 4, 6), Tenant("c", 60, 3, 4)], 64)
    assert offsets == [0, 0, 128] and size == 188


def test_the_smallest_gap_that_fits_is_taken():
    walls = [Tenant("long", 64, 0, 9), Tenant("wide", 640, 0, 4), Tenant("wall", 64, 0, 9),
             Tenant("narrow", 128, 0, 4), Tenant("end", 64, 0, 9)]
    wanted = [*walls, Tenant("new", 128, 5, 9)]
    size, offsets = _placed(wanted, range(6), _met(wanted), 64)
    assert offsets[5] == offsets[3] and size == 64 * 3 + 640 + 128


def test_a_window_is_of_the_arenas_bytes():
    arena = torch.zeros(1024, dtype=torch.uint8)
    WINDOW(arena, 64, [2, 3], torch.float64).fill_(1)
    assert arena[64:64 + 48].view(torch.float64).tolist() == [1.0] * 6
    assert not arena[:64].any() and not arena[112:].any()


def test_a_window_has_a_storage_of_its_own():
    """By which torch finds what a wait waits for: the next gather may be on its way into the same arena."""
    arena = torch.zeros(1024, dtype=torch.uint8)
    windows = [WINDOW(arena, at, [16], torch.bfloat16) for at in (0, 64)]
    assert len({each.untyped_storage()._cdata for each in (arena, *windows)}) == 3
    assert windows[1].data_ptr() == arena.data_ptr() + 64


def test_steps_of_one_model_have_the_largest_buffer_that_one_of_them_needs():
    parameter = torch.nn.Parameter(torch.zeros(2))
    buffer = buffer_of(parameter)
    assert buffer is buffer_of(parameter) and buffer is not buffer_of(torch.nn.Parameter(torch.zeros(2)))
    first = buffer.of(64, "cpu")
    assert buffer.of(32, "cpu").data_ptr() == first.data_ptr() and len(buffer.of(32, "cpu")) == 32
    del first
    assert len(buffer.of(128, "cpu")) == 128 == len(buffer.tensor)
    assert isinstance(buffer, Buffer)
