"""All formats of few bits, one table: of moments, of parameters and their gradients, of activations.

    "signed 8" .. "unsigned 1"    moments, which may be negative or not: `formats.Format`, `factored.Factored`
    "linear 8", 10 and 12         parameters and gradients: `formats.Linear`
    "1-bit mask" .. "int4 offset" activations: `activations.Packing`, which says what each is
"""

from __future__ import annotations

import torch

from .activations import Channels, Float8, Groups, Index, Mask, Outliers, Packing
from .factored import Factored
from .formats import Format, Linear, dynamic_map

FORMATS: dict[str, Format | Factored | Linear | Packing] = {
    "signed 8": Format(8, 256, dynamic_map(8, True), 7),
    "unsigned 8": Format(8, 256, dynamic_map(8, False), 7),
    "signed 4": Format(4, 128, dynamic_map(4, True), 3),
    "unsigned 4": Format(4, 128, tuple((i + 1) / 16 for i in range(16))),
    "signed 1": Factored(True),
    "unsigned 1": Factored(False),
    "linear 8": Linear(8),
    "linear 10": Linear(10),
    "linear 12": Linear(12),
    "1-bit mask": Mask(),
    "1-bit sign": Mask(restores=False),
    "uint8 index": Index(dtype=torch.uint8),
    "int16 index": Index(dtype=torch.int16),
    "int32 index": Index(dtype=torch.int32),
    "int8": Groups(0.0066, bits=8),
    "fp8": Float8(0.026),
    "int4": Groups(0.104),
    "int4 outliers": Outliers(0.102),
    "int4 channels": Channels(0.104),
    "int4 offset": Groups(0.115, offset=True),
}

LINEAR = {form.bits: form for form in FORMATS.values() if isinstance(form, Linear)}


def moment(bits: int, signed: bool) -> Format | Factored:
    """The format of a moment that may be negative, or not."""
    return FORMATS[f"{'signed' if signed else 'unsigned'} {bits}"]


def form_of(map: str, bits: int, block: int, seed: int | None = None, first: int = 0) -> Format | Factored | Linear:
    """The format of these, as operators name it."""
    return FORMATS[f"{map} {bits}"]._replace(block=block, seed=seed, first=first)
