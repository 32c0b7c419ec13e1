"""Seconds that an operator takes, by a roofline: the longer of its arithmetic and its traffic.

    seconds = max(flops / (flops a second), bytes / (bytes a second)) + launch

Float32 products and convolutions on a GPU have the rate of TF32 where PyTorch is set up to compute them
so: by default convolutions, and no products. Flops are PyTorch's own count
(`torch.utils.flop_counter`); bytes are those of operands and results. Such seconds compare plans with
each other and are deterministic, so that equal steps get equal plans; they are no forecast of a clock.
`timing` has those that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .compat.trace import float32_precision, hinted, pytree
from .step_graph import OPERATOR, aliased_args, is_collective, mutated_args, nbytes
from .transfers import BEGINNINGS


@dataclass(frozen=True)
class Rates:
    """What a device can do: `flops` by dtype and `bytes` a second, `launch` seconds an operator, and
    `link` bytes a second to or from the host, or another rank. `tf32` is in flops a second too; 0 if it has none."""

    name: str
    flops: dict[torch.dtype, float]
    bytes: float
    launch: float
    link: float
    tf32: float = 0.0


# Peak figures of the makers' datasheets, without sparsity, of tensor cores but for float32; a link is one direction
# of PCIe, generation 5 or 4 with 16 lanes. A launch is a few microseconds on any of them.
H200 = Rates("H200", {torch.float64: 67e12, torch.float32: 67e12, torch.bfloat16: 989e12,
                      torch.float16: 989e12}, 4.8e12, 3e-6, 64e9, tf32=494e12)  # NVIDIA H200 SXM
H100 = Rates("H100", {**H200.flops}, 3.35e12, 3e-6, 64e9, tf32=494e12)  # NVIDIA H100 SXM
A100 = Rates("A100", {torch.float64: 19.5e12, torch.float32: 19.5e12, torch.bfloat16: 312e12,
                      torch.float16: 312e12}, 2.039e12, 3e-6, 32e9, tf32=156e12)  # NVIDIA A100 80GB SXM
# A core with 256-bit vectors: 16 to 32 float32 operations a cycle and one channel of memory.
CPU = Rates("CPU", {torch.float64: 20e9, torch.float32: 40e9, torch.bfloat16: 20e9,
                    torch.float16: 20e9}, 10e9, 1e-6, 10e9)
GPUS = (H200, H100, A100)
aten = torch.ops.aten
# PyTorch counts neither the CPU's attention nor products that are added in place.
FLOPS: dict[Any, Any] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward:
        flop_registry[aten._scaled_dot_product_flash_attention_backward],
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
}
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward, aten.cudnn_convolution,
                aten.convolution_overrideable}


def rates(device: torch.device | str) -> Rates:
    """The figures of `device`; of an unlisted GPU those of the A100."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    return next((gpu for gpu in GPUS if gpu.name in name), A100)


def flops(node: fx.Node) -> int:
    """Floating-point operations of `node`: PyTorch's formula, or one for each element it makes."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"),
                                        (tuple(node.args), dict(node.kwargs)))
    formula = FLOPS.get(getattr(node.target, "overloadpacket", None))
    value = node.meta.get("val")
    if formula is not None:
        return hinted(formula(*args, **kwargs, out_val=value))
    return sum(hinted(v.numel()) for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor))


def in_tf32(node: fx.Node) -> bool:
    """Whether PyTorch lets a GPU compute `node` in TF32: of float32, and what its settings name."""
    packet = getattr(node.target, "overloadpacket", None)
    kind = "conv" if packet in CONVOLUTIONS else "matmul"
    return (packet in FLOPS and _dtype(node) == torch.float32
            and float32_precision("cuda", kind) == "tf32")


class Seconds(Protocol):
    """Seconds of a node; views and items take none. `source` says where they are from."""

    @property
    def source(self) -> str: ...

    def __call__(self, node: fx.Node) -> float: ...


def computes(node: fx.Node) -> bool:
    """Whether `node` is an operator that makes or changes something, and no view or item."""
    return isinstance(node.target, OPERATOR) and bool(mutated_args(node) or not aliased_args(node))


@dataclass(frozen=True)
class Roofline:
    """Seconds by the figures of a device."""

    rates: Rates

    @property
    def source(self) -> str:
        return f"{self.rates.name} roofline"

    def __call__(self, node: fx.Node) -> float:
        if not computes(node):
            return 0.0
        at = self.rates
        if node.target in BEGINNINGS or is_collective(node):
            return nbytes(node.meta.get("val")) / at.link + at.launch
        moved = sum(nbytes(n.meta.get("val")) for n in (node, *node.all_input_nodes))
        return max(self._arithmetic(node), moved / at.bytes) + at.launch

    def of_loop(self, loop: Sequence[fx.Node]) -> float:
        """Seconds of operators, the last of which alone leaves a result, in one loop over what they read from without."""
        read = {a for node in loop for a in node.all_input_nodes if a not in loop}
        moved = sum(nbytes(n.meta.get("val")) for n in (loop[-1], *read))
        return max(sum(map(self._arithmetic, loop)), moved / self.rates.bytes) + self.rates.launch

    def _arithmetic(self, node: fx.Node) -> float:
        if not computes(node):
            return 0.0
        at = self.rates
        rate = at.tf32 if at.tf32 and in_tf32(node) else at.flops.get(_dtype(node), at.flops[torch.float32])
        return flops(node) / rate


def in_one_loop(seconds: Callable[[fx.Node], float], loop: Sequence[fx.Node], device: torch.device) -> float:
    """What these operators take together, if they are one loop: by the roofline's share of what they take apart."""
    apart = sum(map(seconds, loop))
    by = roofline(device)
    return apart and apart * by.of_loop(loop) / sum(map(by, loop))


def roofline(device: torch.device | str) -> Roofline:
    """Seconds by the figures of `device`."""
    return Roofline(rates(device))


def _dtype(node: fx.Node) -> Any:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return next((v.dtype for v in leaves if isinstance(v, torch.Tensor)), None)
