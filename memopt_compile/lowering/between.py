"""What the program of the Inductor lowering runs itself, between the pieces (see `pieces`, rules 1, 4, 7 and 8)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..arena import WINDOW
from ..checks import is_check
from ..collectives import is_collective, is_wait, operands
from ..compat.trace import is_fake
from ..costs import of_gloo
from ..distributed import planned
from ..finiteness import REQUIRE_FINITE
from ..step_graph import mutated_args
from ..transfers import is_transfer

SEEDS = "prims.inductor_seeds.default"
LITERAL = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)


def is_number(node: fx.Node) -> bool:
    """Whether `node` is one number that the graph tells, and nobody writes (rule 1)."""
    return (node.target in LITERAL and not node.all_input_nodes and not node.meta["val"].dim()
            and not any(node in mutated_args(user) for user in node.users))


def in_its_place(node: fx.Node) -> bool:
    """Whether the program runs `node` neither earlier nor later than the schedule says (rules 7 and 8)."""
    return node.target is REQUIRE_FINITE or is_check(node) or is_transfer(node) or _for_an_arena(node)


def _for_an_arena(node: fx.Node) -> bool:
    """Rule 8: where there is an arena, collectives with their items and waits, and what writes a tenant."""
    if not node.graph.find_nodes(op="call_function", target=WINDOW, sort=False):
        return False
    item = node.target is operator.getitem and is_collective(node.args[0])
    return item or is_collective(node) or is_wait(node) or any(a.target is WINDOW for a in mutated_args(node))


def read_by_program(node: fx.Node) -> list[fx.Node]:
    """What the program gives to `host_call(node)`, and what has to be there until it returns."""
    return operands(node) if _for_an_arena(node) else node.all_input_nodes


def _on_cpu(node: fx.Node) -> bool:
    return all(n.meta["val"].device.type == "cpu" for n in node.all_input_nodes
               if isinstance(n.meta.get("val"), Tensor))


def host_call(node: fx.Node) -> Callable[..., Any]:
    """`node` as a function of the values it reads, for the program (rule 4)."""
    reads, arguments = read_by_program(node), (node.args, node.kwargs)
    collective = is_collective(node) or is_wait(node)
    held = of_gloo(node) if collective and _on_cpu(node) and not planned.active() else 0

    def call(*values: Any) -> Any:
        known = dict(zip(reads, values))
        args, kwargs = fx.map_arg(arguments, known.__getitem__)
        result = node.target(*args, **kwargs)
        if held and is_fake(values[0]):  # a dry run, to learn the peak: what gloo would hold is seen, and gone
            torch.empty(held, dtype=torch.uint8)
        return args[0] if is_wait(node) else result  # of a fake tensor a wait would make another one

    def draw(*_: Any) -> Tensor:
        # From the same range as Inductor's own code draws from, for the same numbers.
        limits = torch.iinfo(torch.int64)
        count, device = node.args
        return torch.ops.aten.randint.low(limits.min, limits.max, [count], dtype=torch.int64,
                                          device=device)

    return draw if str(node.target) == SEEDS else call
