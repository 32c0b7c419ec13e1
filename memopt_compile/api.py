"""What the user types besides `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import OptionError
from .report import Report, explain, report

__all__ = ["Report", "compile", "explain", "micro_batches", "report"]


def compile(step: Callable, **options: Any) -> Callable:
    """`torch.compile(step, backend="memopt", options=options)`, with the options as keywords."""
    from .driver import backend

    return torch.compile(step, backend=backend, options=options)


def micro_batches(n: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The mini-batch in `n` chunks along the first dimension, to loop over inside the step.

    Every tensor is cut alike; where the batch does not divide by `n` the first chunks are one
    sample longer. A ``for`` statement over the result compiles in a time that hardly grows with
    `n`, as long as the loop keeps nothing but tensors from one iteration to the next: a counter
    (``enumerate`` too) or a list that grows has every iteration traced. Divide the loss by `n`
    (or weigh it by its share of samples) so that the accumulated gradient is that of the whole
    batch.

    Raises:
        OptionError: `n` is not between 1 and the batch, or the tensors differ in their first
            dimension or are none.
    """
    if isinstance(n, (float, Tensor)) or not all(isinstance(t, Tensor) for t in tensors):  # an int, or one of NumPy
        raise OptionError("something else is given than a number and tensors", where="micro_batches",
                          do="give the number, then each tensor: micro_batches(4, batch[\"input_ids\"], batch[\"labels\"])")
    sizes = {t.shape[0] if t.dim() else 0 for t in tensors}
    if len(sizes) != 1:
        raise OptionError(f"the tensors have first dimensions {sorted(sizes)}",
                          where="micro_batches", do="pass tensors of one mini-batch")
    size = sizes.pop()
    if n < 1 or n > size:
        raise OptionError(f"a batch of {size} cannot be cut into {n} micro-batches",
                          where="micro_batches", do=f"choose n from 1 to {size}")
    return list(zip(*(t.tensor_split(n) for t in tensors)))
