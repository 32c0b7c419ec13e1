"""The ways in which the activations of a step could be packed, with what each costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from .compression import COMPRESS, DECOMPRESS, layout
from .quantization.activations import FORMATS
from .sensitivity import Sensitivity
from .step_graph import nbytes

SMALLEST = 4096  # bytes: less is not worth two operators
LARGEST = 0.6  # of the value: more is not worth it either


@dataclass(frozen=True)
class Packed:
    """A value in the format `form`: `nbytes` from one operator, `encode`, to the other, `decode`, which
    together take `seconds`. Both nodes are in no graph: they say what would be called."""

    form: str
    nbytes: int
    seconds: float
    encode: fx.Node
    decode: fx.Node

    @property
    def error(self) -> float:
        return FORMATS[self.form].error

    @property
    def lossy(self) -> bool:
        return self.error > 0

    @property
    def restores(self) -> bool:
        return FORMATS[self.form].restores


def candidates(found: Sensitivity, seconds: Callable[[fx.Node], float],
               max_error: float | None = None,
               instead: Mapping[str, str] = MappingProxyType({})) -> dict[fx.Node, tuple[Packed, ...]]:
    """For each activation the formats that make it smaller by enough, up to this error; in place of
    "int4 outliers" what its name has in `instead`."""
    most = 1.0 if max_error is None else max_error

    def offered(node: fx.Node, forms: tuple[str, ...]) -> dict[str, None]:
        return dict.fromkeys(instead.get(node.name, f) if f == "int4 outliers" else f for f in forms)

    made = {node: tuple(_packed(node, form, seconds) for form in offered(node, forms)
                        if FORMATS[form].error <= most)
            for node, forms in found.formats.items() if nbytes(node.meta["val"]) >= SMALLEST}
    small = {node: tuple(p for p in ways if p.nbytes <= LARGEST * nbytes(node.meta["val"]))
             for node, ways in made.items()}
    return {node: ways for node, ways in small.items() if ways}


def _packed(node: fx.Node, form: str, seconds: Callable[[fx.Node], float]) -> Packed:
    graph, value = fx.Graph(), node.meta["val"]
    source = graph.placeholder(node.name)
    source.meta["val"] = value
    encode = graph.call_function(COMPRESS, (source, form))
    encode.meta["val"] = COMPRESS(value, form)
    parts = []
    for i, part in enumerate(encode.meta["val"]):
        parts.append(graph.placeholder(f"part_{i}"))
        parts[-1].meta["val"] = part
    decode = graph.call_function(DECOMPRESS, (parts, form, *layout(value)))
    decode.meta["val"] = value
    return Packed(form, nbytes(encode.meta["val"]), seconds(encode) + seconds(decode), encode, decode)
