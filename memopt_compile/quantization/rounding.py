"""bfloat16, alone or with a byte, by stochastic rounding: up or down, the likelier the nearer.

A moment that moves by a thousandth of itself in a step never moves if it is rounded to the
nearest of bfloat16's numbers, which are 2⁻⁸ apart. Rounded at random it moves in one step of many.

What decides is a hash of the seed, the step and the element's place: no state but the step count
that the optimizer has anyway. So a step gives the same eager, captured, in slabs of any size, and
after a restart.

24 bits are those of a float32 without its last 8: the bfloat16 nearest to them, and in a byte what
it lacks, in 256ths of its last place (the idea of FlashOptim's master weights). As integers,

    bits = high·2¹⁶ + low·2⁸,  −128 ≤ low < 128,

whether or not a power of 2 lies between, and nothing is lost in taking apart and joining. 32 bits are a
float32 as it is, taken apart in the same way with all 16 bits in `low`: a master copy for two bytes. Nothing
is rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Odd, below 2^15 and without a pattern: one multiplier a round, and what a step and a seed add.
ROUNDS = ((0x6A3B, 0x3C6F, 0x7F4B), (0x5D2D, 0x52DD, 0x1B56), (0x4E97, 0x2AB1, 0x6487),
          (0x73A5, 0x68E5, 0x4B2D))
UPPER = (0x2F65, 0x7A91, 0x39C7, 0x5E0B)  # the same for what a seed has above 16 bits

LOW = {24: torch.int8, 32: torch.int16}


class Rounded(NamedTuple):
    """How a tensor is stored: a bfloat16 for each element, chosen with this seed."""

    seed: int
    bits: int = 16
    """Or 24 or 32: with an integer that holds the next 8 or 16 bits."""
    block: int = 256
    """Elements in whole multiples of which it is cut, as `Format`. They share nothing."""
    first: Any = 0
    """The place of the first element, an integer or a 0-dim tensor of one."""

    @property
    def random(self) -> bool:
        return self.bits < 32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block,)

    def sizes(self, count: int) -> tuple[int, int]:
        """Numbers of stored elements and of scales."""
        return count, 0


def rounded(value: Tensor, form: Rounded, step: Any, first: int = 0) -> Tensor:
    """All elements in row-major order in bfloat16, without bias, by way of float32.

    Args:
        step: count of steps, an integer or a 0-dim tensor of one.
        first: the place of the first element in its tensor.
    """
    return _bits(value, form, step, first).view(torch.float32).to(torch.bfloat16)


def split(value: Tensor, form: Rounded, step: Any, first: int = 0) -> tuple[Tensor, Tensor]:
    """All elements in row-major order in 24 or 32 bits, without bias: (high, bfloat16; low, see `LOW`)."""
    bits = _bits(value, form, step, first)
    high = (bits + (1 << 15)) & (-1 << 16)
    return high.view(torch.float32).to(torch.bfloat16), ((bits - high) >> (32 - form.bits)).to(LOW[form.bits])


def joined(high: Tensor, low: Tensor) -> Tensor:
    """What `split` took apart, float32. A zero from elsewhere, `low` below it, stays a zero."""
    bits, low = high.to(torch.float32).view(torch.int32), as_16_bits(low).to(torch.int32)
    return (bits + torch.where(high == 0, low.relu(), low)).view(torch.float32)


def as_16_bits(low: Tensor) -> Tensor:
    """The lower half of 24 bits as that of 32."""
    return low if low.dtype == torch.int16 else low.to(torch.int16) << 8


def to_bytes(low: Tensor) -> Tensor:
    """`low` with a last dimension of its bytes: neither gloo nor NCCL sends integers of 16 bits."""
    return low.unsqueeze(-1).view(torch.int8)


def from_bytes(parts: Tensor) -> Tensor:
    """What `to_bytes` was given, also where torch.optim has made floats of the bytes."""
    parts = parts.to(torch.int8).contiguous()
    return (parts if parts.shape[-1] == 1 else parts.view(torch.int16)).squeeze(-1)


def _bits(value: Tensor, form: Rounded, step: Any, first: int) -> Tensor:
    """The float32 bits of `value` as int32, those beyond `form.bits` rounded away."""
    flat = value.reshape(-1).to(torch.float32)
    # Some devices' NaN has all bits set: a carry would make a number of it.
    bits = torch.where(flat.isnan(), float("nan"), flat).view(torch.int32)
    if form.bits == 32:
        return bits
    places = places_from(first + form.first, flat)
    # The lower bits are what is dropped: a uniform number carries in proportion to them.
    drawn = noise(places, form.seed, step) >> (form.bits - 16)
    return drawn.add_(bits).bitwise_and_(-1 << (32 - form.bits))


def moves(values: Tensor, near: Tensor, other: Tensor, drawn: Tensor) -> Tensor:
    """Where a value goes to `other`, the point on its far side, and not to the one that is `near`.

    It does with a probability of its share of the way there, to 2⁻¹⁶: the mean is the value. A value
    that is a point stays, as does one with no point on its far side. `drawn` is a number of 16 bits for each. Of a way
    below about 10⁻⁴⁰ float32 has no 2⁻¹⁶th: all go.
    """
    way = (other - near).abs()
    return (drawn + 0.5) * (2.0**-16 * way) < (values - near).abs()


def places_from(first: Any, flat: Tensor) -> Tensor:
    """The place of each element of a vector, int32; `first` is an integer or a 0-dim tensor of one."""
    return torch.arange(flat.numel(), dtype=torch.int32, device=flat.device) + first


def noise(places: Tensor, seed: int, step: Any) -> Tensor:
    """A number of 16 bits for each place, int32; a new tensor.

    A Feistel network over the place's two halves. No product exceeds 31 bits: what overflow does is
    left to the device.
    """
    left, right = (places >> 16) & 0xFFFF, places & 0xFFFF
    for (multiplier, by_step, by_seed), by_upper in zip(ROUNDS, UPPER):
        key = (step * by_step + seed * by_seed + (seed >> 16) * by_upper) & 0xFFFF
        if isinstance(key, Tensor):
            key = key.to(torch.int32)
        mixed = (((right ^ key) * multiplier) >> 8) & 0xFFFF
        left, right = right, left ^ mixed
    return right
