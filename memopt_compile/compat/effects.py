"""What a part of a trace changes: tensors that were there before it, and objects of Python's.

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.variables.base import (
    AttributeMutationNew,
    ValueMutationExisting,
    ValueMutationNew,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor

from . import lists

HELD = "what a list or dict holds"


def watch(tx: Any) -> Callable[[list], str]:
    """Says later, of the tensor variables that may be written: what else was changed since, ``""`` if nothing was."""
    effects = tx.output.side_effects  # another object behind a function that is traced apart
    versions, contents = _versions(tx), _contents(effects)
    known = {id(variable) for variable in effects.id_to_variable.values()} | {id(owner) for owner, _ in contents}

    def is_changed(owner: Any, name: str, content: Any) -> bool:
        made = isinstance(owner.mutation_type, AttributeMutationNew | ValueMutationNew) and id(owner) not in known
        return not made and owner.mutation_type is not None and tx.output.side_effects.is_modified(owner) and (
            contents.get((owner, name)) != content)

    def changed(allowed: list) -> str:
        ours = {_storage(each.realize().as_proxy().node) for each in allowed}
        for node, version in _versions(tx).items():
            is_there = node in versions or node.op == "placeholder"
            if is_there and version != versions.get(node, 0) and _storage(node) not in ours:
                return f"a tensor ({node.name})"
        return next((name for (owner, name), content in _contents(tx.output.side_effects).items() if is_changed(owner, name, content)), "")

    return changed


def _storage(node: Any) -> int:
    return node.meta["example_value"].untyped_storage()._cdata


def _versions(tx: Any) -> dict[Any, int]:
    return {node: value._version for node in tx.output.graph.nodes
            if isinstance(value := node.meta.get("example_value"), FakeTensor)}


def _contents(effects: Any) -> dict[tuple[Any, str], Any]:
    """Attributes that the trace has set, and what is in the lists and dicts that it knows, by owner and name."""
    found = {(owner, name): _same(value) for owner, written in effects.store_attr_mutations.items()
             for name, value in written.items()}
    for variable in [*effects.id_to_variable.values()]:
        held = getattr(variable, "_base_vt", None) or variable  # of a defaultdict
        if isinstance(held, tuple(lists.WHOLE)):
            found[variable, HELD] = [id(each) for each in held.added]
        elif isinstance(items := getattr(held, "items", None), list | dict):
            found[variable, HELD] = [*map(_same, items.values() if isinstance(items, dict) else items)]
        elif isinstance(variable.mutation_type, ValueMutationExisting):
            found[variable, type(variable).__name__] = variable.mutation_type.is_modified
    return found


def _same(variable: Any) -> Any:
    """What two variables of one thing have in common."""
    real = variable.realize() if isinstance(variable, LazyVariableTracker) and variable.is_realized() else variable
    return real.as_proxy().node if isinstance(real, TensorVariable) else id(variable)
