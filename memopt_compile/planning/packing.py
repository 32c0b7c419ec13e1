"""The ways in which the activations of a step could be packed or put away, with what each costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, fx

from .. import partition
from ..collectives import GATHER
from ..compression import COMPRESS, DECOMPRESS, is_dense, layout
from ..distributed.tensor_parallel import Group
from ..quantization.named import FORMATS
from ..step_graph import nbytes
from ..transfers import FROM_HOST, HOST, TO_HOST
from .sensitivity import Sensitivity

SMALLEST = 4096  # bytes: less is not worth two operators
LARGEST = 0.6  # of the value: more is not worth it either
LARGEST_INT4 = 0.3  # likewise; kept columns and groups that are not full come to more where rows are few


@dataclass(frozen=True)
class Packed:
    """A value in the format `form`: `nbytes` from one operator, `encode`, to the other, `decode`, which
    together take `seconds`. Both nodes are in no graph: they say what would be called."""

    form: str
    nbytes: int
    seconds: float
    encode: fx.Node
    decode: fx.Node
    error: float = 0.0
    restores: bool = True

    @property
    def lossy(self) -> bool:
        return self.error > 0


def candidates(found: Sensitivity, seconds: Callable[[fx.Node], float],
               max_error: float | None = None,
               instead: Mapping[str, str] = MappingProxyType({})) -> dict[fx.Node, tuple[Packed, ...]]:
    """For each activation the formats that make it smaller by enough, up to this error; in place of
    "int4 outliers" what its name has in `instead`, and in place of a kind of "int4" that is too large "int4" itself."""
    most = 1.0 if max_error is None else max_error

    def offered(node: fx.Node, forms: tuple[str, ...]) -> dict[str, None]:
        return dict.fromkeys(instead.get(node.name, f) if f == "int4 outliers" else f for f in forms)

    known: dict[tuple, Packed] = {}  # layers have activations alike

    def packed(node: fx.Node, form: str) -> Packed:
        value = node.meta["val"]
        sizes = (*value.shape, *value.stride())
        key = form, value.dtype, value.device, nbytes(value), sizes if all(type(n) is int for n in sizes) else node
        if key not in known:
            made = _packed(node, form, seconds)
            large = form.startswith("int4 ") and made.nbytes > LARGEST_INT4 * nbytes(value)
            known[key] = packed(node, "int4") if large else made
        return known[key]

    made = {node: tuple(packed(node, form) for form in offered(node, forms) if FORMATS[form].error <= most)
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
    return Packed(form, nbytes(encode.meta["val"]), seconds(encode) + seconds(decode), encode, decode,
                  FORMATS[form].error, FORMATS[form].restores)


def in_parts(node: fx.Node, seconds: Callable[[fx.Node], float], group: Group, host: bool) -> tuple[Packed, ...]:
    """The value of `node` kept in parts by the ranks of a group that have it alike, with `host` also in their
    hosts' memory, if that is worth it."""
    graph, value = fx.Graph(), node.meta["val"]
    if not partition.can_be_parted(value, group.ranks) or nbytes(value) < SMALLEST:
        return ()
    source, mine = graph.placeholder(node.name), graph.placeholder("part")
    source.meta["val"], mine.meta["val"] = value, partition.PART(value, group.rank, group.ranks)
    encode = graph.call_function(partition.PART, (source, group.rank, group.ranks))
    decode = graph.call_function(GATHER, (mine, group.ranks, group.name))
    encode.meta["val"], decode.meta["val"] = mine.meta["val"], value
    time = seconds(encode) + seconds(decode)
    kept = Packed(partition.RANKS, nbytes(mine.meta["val"]), time, encode, decode)
    away = [sum(p.seconds for p in in_host_memory(mine, seconds))] if host else []
    return (kept, *(Packed(partition.RANKS_HOST, 0, time + more, encode, decode) for more in away if more))


def in_host_memory(node: fx.Node, seconds: Callable[[fx.Node], float]) -> tuple[Packed, ...]:
    """The value of `node` sent to the host and fetched again, if that is worth it. The seconds are those of
    copies with no other work beside them."""
    graph, value = fx.Graph(), node.meta["val"]
    if not isinstance(value, Tensor) or nbytes(value) < SMALLEST or not is_dense(value):
        return ()
    source, sent = graph.placeholder(node.name), graph.placeholder("sent")
    source.meta["val"], sent.meta["val"] = value, TO_HOST(value)
    encode = graph.call_function(TO_HOST, (source,))
    decode = graph.call_function(FROM_HOST, (sent, value.device))
    encode.meta["val"], decode.meta["val"] = sent.meta["val"], value
    return (Packed(HOST, 0, seconds(encode) + seconds(decode), encode, decode),)
