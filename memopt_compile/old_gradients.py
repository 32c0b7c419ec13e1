"""Old gradients that a step replaces unread are freed as early as in eager, where ``zero_grad()`` does so: at the start
of the step, or once the checks that come before it have passed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .checks import passing


def dropping(run: Callable, replaced: Sequence[Collection[str]], leaves: Mapping[int, str]) -> Callable:
    """`run` of a step's inputs without the old gradients of those at the places `leaves`, whose names in the frame are given.
    At each check of the frame it has `replaced` those of these names."""
    behind: dict[int, list[int]] = {}  # so many checks
    for place, name in leaves.items():
        behind.setdefault(sum(name not in names for names in replaced), []).append(place)

    def run_without_old_gradients(*inputs: Any) -> Any:
        passed = -1

        def drop() -> None:
            nonlocal passed
            passed += 1
            for place in behind.get(passed, ()):
                inputs[place].grad = None

        drop()
        with passing(drop):
            return run(*inputs)

    return run_without_old_gradients if leaves else run
