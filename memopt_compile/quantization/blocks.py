"""What all formats do alike: to cut into blocks, to find what a block is scaled by, to pack codes into bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def whole_blocks(flat: Tensor, block: int) -> Tensor:
    """The vector, with zeros to the end of its last block."""
    missing = -flat.numel() % block
    return F.pad(flat, (0, missing)) if missing else flat


def extremes(blocks: Tensor, inner: Sequence[int]) -> Tensor:
    """The element of largest magnitude, with its sign, of blocks that extend over the dimensions `inner`, which
    stay with size 1."""
    high, low = blocks.amax(inner, keepdim=True), blocks.amin(inner, keepdim=True)
    return torch.where(high >= -low, high, low)


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8: the 8/bits codes along dimension 1 in one byte, the first in its lowest bits."""
    byte = codes[:, 0]
    for i in range(1, 8 // bits):
        byte = byte | (codes[:, i] << (i * bits))
    return byte.to(torch.uint8)


def unpacked(packs: Tensor, bits: int) -> Tensor:
    """The codes of bytes, of any integer type, along a new dimension 1."""
    shifts = torch.arange(0, 8, bits, dtype=packs.dtype, device=packs.device)
    return (packs[:, None] >> shifts.view(-1, *[1] * (packs.dim() - 1))) & (2**bits - 1)
