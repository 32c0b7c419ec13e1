"""A `torch.compile` backend that makes whole training steps fit.

>>> step = torch.compile(step, backend="memopt", options={"memory_budget": "6GiB"})

Importing this package changes nothing. Using the backend puts a scope around Dynamo's tracing that is
inert for every other backend; `memopt_compile.driver.uninstall()` takes it away again.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import optim
    from .api import compile, explain, micro_batches, report
    from .distributed.planned import planned_ranks
    from .distributed.sharding import shard_
    from .errors import (
        CaptureError,
        InfeasibleBudget,
        MemoptError,
        NumericsError,
        OptimizerError,
        OptionError,
        PassError,
        QuantizationError,
        RankError,
        VerifyError,
    )
    from .low_precision import dequantize_parameters_, quantize_parameters_
    from .measure import measure
    from .options import Options
    from .reporting.layered import explain_layers
    from .reporting.timeline import draw

# Loaded at first use: importing the package costs nothing beyond torch.
_HOME = {
    **dict.fromkeys(("compile", "explain", "report", "micro_batches"), "api"),
    **dict.fromkeys(("MemoptError", "CaptureError", "OptionError", "InfeasibleBudget",
                     "VerifyError", "PassError", "NumericsError", "OptimizerError",
                     "QuantizationError", "RankError"), "errors"),
    **dict.fromkeys(("quantize_parameters_", "dequantize_parameters_"), "low_precision"),
    "Options": "options",
    "measure": "measure",
    "draw": "reporting.timeline",
    "explain_layers": "reporting.layered",
    "shard_": "distributed.sharding",
    "planned_ranks": "distributed.planned",
}
_PACKAGES = ("optim",)
__all__ = sorted([*_HOME, *_PACKAGES])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps the public `report` and `measure` when the modules of those names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
