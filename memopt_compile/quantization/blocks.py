"""Vectors in whole blocks, as all formats cut them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def whole_blocks(flat: Tensor, block: int) -> Tensor:
    """The vector, with zeros to the end of its last block."""
    missing = -flat.numel() % block
    return F.pad(flat, (0, missing)) if missing else flat
