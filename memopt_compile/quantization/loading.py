"""A checkpoint that is loaded into a parameter in low precision part by part, as it was saved by several ranks.

torch.distributed.checkpoint narrows the tensor that it loads into to the place of each part, and copies the part into
that view. Views of these parameters are copies, and the part would be lost. So it is given views of the values of all of
the parameter, which are encoded anew whenever a part has come. They stay there until the last one: an
element that was encoded beside old neighbours would have been rounded by their scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compat import subclass


class Part(Tensor):
    """A view of values; a copy into it calls `written`."""

    __torch_function__ = subclass.no_torch_function
    written: Callable[[], Any]

    def narrow(self, dim: int, start: Any, length: int) -> Part:
        return part(super().narrow(dim, start, length), self.written)

    def detach(self) -> Part:
        return self

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Part:
        super().copy_(source, non_blocking)
        self.written()
        return self


def part(values: Tensor, written: Callable[[], Any]) -> Part:
    made = values.as_subclass(Part)
    made.written = written
    return made


class Loading:
    """The values that the parts of `p` have come to so far, unless something else has written to it since."""

    def __init__(self, p: Any) -> None:
        self.p, self.values, self.draws = p, None, -1

    @torch.no_grad()
    def narrow(self, dim: int, start: Any, length: int) -> Part:
        if self.draws != int(self.p.draws):
            self.values, self.draws = self.p.dequantize(), int(self.p.draws)
        return part(self.values, self.write).narrow(dim, start, length)

    @torch.no_grad()
    def write(self) -> None:
        self.p.copy_(self.values)
        self.draws = int(self.p.draws)
