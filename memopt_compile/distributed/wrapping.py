"""Methods of PyTorch's classes that are replaced as long as memopt acts in the process, and put back by `uninstall`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()
_replaced: dict[tuple[type, str], Any] = {}  # what stood there


def replace(kind: type, name: str, make: Callable[[Any], Any]) -> None:
    """Have ``make(method)`` stand for method `name` of `kind`, its own or an inherited one. Once."""
    if (kind, name) not in _replaced:
        _replaced[kind, name] = vars(kind).get(name, _ABSENT)
        setattr(kind, name, make(getattr(kind, name)))


def put_back() -> None:
    while _replaced:
        (kind, name), before = _replaced.popitem()
        if before is _ABSENT:
            delattr(kind, name)
        else:
            setattr(kind, name, before)
