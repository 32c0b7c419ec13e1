"""Let the host compute what it can of its own numbers before the step, so that the rest is the device's alone.

PyTorch's optimizers keep their counts of steps in the host's memory, and rates are Python numbers. What comes of
them (bias corrections) is a few numbers for each parameter, which kernels are given one by one: no CUDA graph can
be recorded of that, as it would replay the numbers of its recording. The rules:

1. Ahead goes what is computed in the host's memory of inputs in the host's memory alone, without side effects: nothing
   drawn, nothing read from the device. New values of such inputs are written when the step is over.
2. Each such number that the device reads becomes an input of the step in the device's memory, of the same dtype.
3. All or nothing: where anything else forbids a CUDA graph (`recordable`), the step stays as it is. So it does where the
   eager lowering would round: a kernel computes with a number of the host's in the precision that it computes in,
   but a number on the device is brought to the dtype of the tensor it meets first.
4. PyTorch's kernel divides by a number of the host's by multiplying with its reciprocal, and by one on the device
   truly. On the eager lowering the host computes the reciprocal therefore (of 32 and 64 bits).

Before:  n = add(s2, 1); c = rsub(pow(0.9, n), 1); y = div(x, c); copy_(s2, n)        s2, n, c on the host
After:   ahead: add = add(s2, 1); pow = ..; rsub = ..; n1 <- rsub; s2 <- add
         y = div(x, n1)

Memory: 16 bytes on the device for each number. Numbers: the same to rounding (docs/results/cuda.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.compat.trace import pytree
from memopt_compile.host_part import SLOT, HostPart
from memopt_compile.ordering import is_random
from memopt_compile.recordable import obstacle
from memopt_compile.step_graph import OPERATOR, Input, Role, StepGraph, mutated_args
from memopt_compile.step_pass import StepPass

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class HostAhead(StepPass):
    """`asked`: whether a CUDA graph was asked for; `rounds`: whether the lowering rounds (rule 3)."""

    name: ClassVar[str] = "host_ahead"

    asked: bool = True
    rounds: bool = False

    def requires(self, step: StepGraph) -> str | None:
        host = on_host(step)
        read = _read(host)
        if not read and not any(n.target is _COPY for n in host):
            return "the step needs no number of the host's"
        if any(not isinstance(v := n.meta["val"], Tensor) or v.dim() for n in read):
            return "the device reads more than numbers of the host's"
        if any(_on_cpu(user) for n in read for user in n.users if user not in host):
            return "the host does more with its numbers than arithmetic"
        if any(n in host and n.op != "placeholder" for n in step.graph.output_node().all_input_nodes):
            return "a result is made on the host"
        readers = [(user, n) for n in read for user in n.users if user not in host]
        if self.rounds and any(_narrower(user, n) for user, n in readers):
            return "numbers of the host's meet values of fewer bits, and on the device would be rounded to them first"
        if self.rounds and any(user.target is torch.ops.aten.div.Tensor_mode for user, _ in readers):
            return "a quotient is rounded to a whole number, which PyTorch's kernel does otherwise with a number of the host's"
        return obstacle(step, self.asked, host)

    def run(self, step: StepGraph, costs: Any = None) -> None:
        if self.rounds:
            _multiply_for_quotients(step)
        host = on_host(step)
        read, place = _read(host), {n: i for i, n in enumerate(step.placeholders)}
        device = next(v.device for n in step.placeholders if isinstance(v := n.meta["val"], Tensor) and v.is_cuda)
        # Nothing is written before the step is over: the value that is copied stands for the copy.
        value = {n: n.args[1] if n.target is _COPY else n for n in host}
        written = {n.args[0]: n.args[1] for n in host if n.target is _COPY}
        graph, twins = fx.Graph(), {}
        for node in host:
            if node.target is not _COPY:
                twins[node] = graph.node_copy(node, lambda n: twins[value[n]])
        graph.output((*(twins[value[n]] for n in read), *(twins[v] for v in written.values())))
        graph.eliminate_dead_code()
        first = len(place)
        step.ahead = HostPart(fx.GraphModule(step.module, graph), tuple(place[n] for n in host if n in place),
                              tuple(range(first, first + len(read))), tuple(map(place.__getitem__, written)))
        for node in read:
            number = _input(step, node, device)
            for user in [u for u in node.users if u not in host]:
                user.replace_input_with(node, number)
        for node in reversed(host):
            if node.op != "placeholder":
                step.erase(node)


def on_host(step: StepGraph) -> dict[fx.Node, None]:
    """Inputs in the host's memory, and what is computed there of them alone (rule 1), in order."""
    found: dict[fx.Node, None] = {}
    for node in step.graph.nodes:
        if node.op == "output" or not _on_cpu(node):
            continue
        if node.op == "call_function" and not (
                isinstance(node.target, OPERATOR) and all(n in found for n in node.all_input_nodes)
                and not is_random(node) and (_is_update(node) or not (mutated_args(node) or node.is_impure()))):
            continue
        found[node] = None
    return found


def _on_cpu(node: fx.Node) -> bool:
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return bool(values) and all(v.device.type == "cpu" for v in values)


def _is_update(node: fx.Node) -> bool:
    """Whether `node` gives an input another value."""
    if node.target is not _COPY or node.args[0].op != "placeholder" or node.args[1].target is _COPY:
        return False
    to, value = (n.meta["val"] for n in node.args[:2])
    return (to.dtype, to.shape) == (value.dtype, value.shape)


def _read(host: dict[fx.Node, None]) -> list[fx.Node]:
    """Those that something else reads."""
    return [n for n in host if any(u not in host and u.op != "output" for u in n.users)]


def _narrower(user: fx.Node, number: fx.Node) -> bool:
    narrow = {v.dtype for v in pytree.tree_leaves(user.meta.get("val")) if isinstance(v, Tensor)
              } & {torch.bfloat16, torch.float16}
    return bool(narrow - {number.meta["val"].dtype})


def _multiply_for_quotients(step: StepGraph) -> None:
    """Rule 4: the reciprocal is of the precision that the kernel computes in, which for 16 bits is another."""
    host = on_host(step)
    for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor):
        if node in host or (number := node.args[1]) not in host or node.meta["val"].dtype not in (torch.float32, torch.float64):
            continue
        with step.graph.inserting_before(node):
            number = step.call(node, torch.ops.aten._to_copy.default, number, dtype=node.meta["val"].dtype)
            reciprocal = step.call(node, torch.ops.aten.reciprocal.default, number)
        node.target, node.args = torch.ops.aten.mul.Tensor, (node.args[0], reciprocal)


def _input(step: StepGraph, node: fx.Node, device: torch.device) -> fx.Node:
    """A new last input for the number `node`."""
    with step.graph.inserting_after(step.placeholders[-1]):
        number = step.graph.placeholder(f"number_{len(step.inputs)}")
    value = node.meta["val"]
    with value.fake_mode:
        number.meta["val"] = torch.empty((), dtype=value.dtype, device=device)
    step.inputs = (*step.inputs, Input(number.name, Role.NUMBER, f"{node.name}, made on the host", SLOT))
    return number
