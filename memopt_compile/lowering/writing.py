"""The forms of ATen operators that write their result into a buffer that is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def writing_form(node: fx.Node, buffer: fx.Node) -> tuple[Any, tuple, dict] | None:
    """`node` as an operator that writes into `buffer`: ``op_`` on its first operand, else ``out=``."""
    base = node.target._schema.name.removeprefix("aten::")
    given = _signature(node.target)
    for form in _overloads(f"{base}_"):
        if node.args[0] is buffer and _signature(form) == given:
            return form, node.args, node.kwargs
    for form in _overloads(base):
        out = form._schema.arguments[-1]
        if out.is_out and _signature(form)[:-1] == given:
            return form, node.args, {**node.kwargs, out.name: buffer}
    return None


def _signature(form: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in form._schema.arguments]


def _overloads(name: str) -> list[Any]:
    """All but the generated forms: those compute into a fresh buffer and then copy."""
    packet = getattr(aten, name, None)
    forms = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return [f for f in forms if torch.Tag.generated not in f.tags]
