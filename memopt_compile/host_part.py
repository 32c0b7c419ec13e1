"""What the host computes of its own numbers before the device begins: counts of steps, rates, bias corrections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

SLOT = 16  # bytes on the device for each number: kernels are made for inputs that begin at a multiple of it


@dataclass(frozen=True, eq=False)
class HostPart:
    """Arithmetic without side effects on inputs of a step that lie in the host's memory.

    The placeholders of `module` are the step's inputs at the positions `given`. It returns first the numbers that the
    step has as its inputs at the positions `numbers`, on the device, then what the inputs at `written` shall be after it.
    """

    module: fx.GraphModule
    given: tuple[int, ...]
    numbers: tuple[int, ...]
    written: tuple[int, ...]
