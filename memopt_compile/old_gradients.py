"""Old gradients that a step replaces unread are freed as early as in eager, where ``zero_grad()`` does so: at the start
of the step, or once the checks that come before it have passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from .checks import REQUIRE, passing


def dropping(run: Callable, gm: fx.GraphModule, leaves: Mapping[int, str]) -> Callable:
    """`run`, what Dynamo's code for its graph `gm` calls, without the old gradients of its inputs `leaves`, whose names in
    the frame are given."""
    checks = gm.graph.find_nodes(op="call_function", target=REQUIRE)
    behind: dict[int, list[int]] = {}  # so many checks
    for place, name in leaves.items():
        behind.setdefault(sum(name not in node.meta["replaced"] for node in checks), []).append(place)

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
