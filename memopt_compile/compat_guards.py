"""What decides what a step does, and Dynamo does not guard. Checked against torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource

GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


def call_module(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A module's call, guarded on the hooks of all modules: Dynamo asks whether there are any, and guards the module's
    own only."""
    hooks = tx.import_source("torch.nn.modules.module")
    for name in GLOBAL_HOOKS:
        install_guard(AttrSource(hooks, name).make_guard(GuardBuilder.SEQUENCE_LENGTH))
    return original(self, tx, args, kwargs)
