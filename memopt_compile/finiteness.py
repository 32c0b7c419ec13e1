"""Steps that meet a number which fewer bits cannot hold are taken back and run exactly.

A format of few bits makes NaN of a group in which one element is not finite, while the exact step may do
well with it: softplus(-inf) is 0 and has no gradient. `passes.check_finite` has the step look at the
scales of all formats before it changes anything that stays; what it meets there is raised as
`NotFinite`, and `falling_back` runs another program for the same inputs and random numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from .step_graph import StepGraph

log = logging.getLogger("memopt_compile")


class NotFinite(Exception):
    """An activation that is kept in fewer bits has an element that is not finite."""


@torch.library.custom_op("memopt::require_finite", mutates_args=())
def require_finite(total: Tensor, written: list[Tensor], saved: list[Tensor]) -> None:
    """Nothing if the sum of all scales is finite; else put back what was `written` and raise."""
    if not torch.isfinite(total):
        for to, value in zip(written, saved):
            to.copy_(value)
        raise NotFinite


require_finite.register_fake(lambda total, written, saved: None)
REQUIRE_FINITE = has_side_effect(torch.ops.memopt.require_finite.default)


def not_looking(step: StepGraph) -> StepGraph:
    """The step, or a copy of it that is never taken back: one compiled program is not left half-way."""
    if any(node.target is REQUIRE_FINITE for node in step.computing()):
        log.warning("activations that are not finite are not looked for: the step is one piece")
        step = step.copy()
        for node in step.graph.find_nodes(op="call_function", target=REQUIRE_FINITE):
            step.erase(node)
    return step


def falling_back(run: Callable[[list], Any], exact: Callable[[], Callable[[list], Any]],
                 device: torch.device) -> Callable[[list], Any]:
    """`run`, a boxed callable; what it cannot do is done by `exact()`, which is asked for every time."""

    def taken_back(inputs: list) -> Any:
        given = list(inputs)
        with random_numbers(device) as restore:
            with contextlib.suppress(NotFinite):
                return run(inputs)
            # Outside the handler: the traceback would hold what the program had allocated.
            restore()
            return exact()(given)

    taken_back._boxed_call = True  # type: ignore[attr-defined]
    return taken_back


@contextlib.contextmanager
def random_numbers(device: torch.device) -> Iterator[Callable[[], None]]:
    """What sets the generators that a step on `device` draws from back to where they are now."""
    host = torch.default_generator.clone_state()  # not its state as a tensor: 5 kB that no budget has
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host.get_state())
        if own is not None:
            torch.cuda.set_rng_state(own, device)

    yield restore
