"""Train one case in eager and under memopt, and hold everything against everything."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from memopt_compile import driver
from memopt_compile.measure import Measurement, measure

STEPS, MEASURED = 5, 3  # the fourth step is measured: by then nothing is compiled any more
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass
class Training:
    """A step, what it trains, and its batches."""

    step: Callable[..., Any]
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    batch: Callable[[int], tuple] = lambda i: ()
    after: Callable[[int], None] = lambda i: None


@dataclass
class Case:
    """`build` makes the same training each time, from the random state it is called with."""

    name: str
    build: Callable[[], Training]
    dtype: torch.dtype = torch.float64
    note: str = ""
    steps: int = STEPS
    tolerance: float | None = None


@dataclass
class Row:
    """What came of one case. Bytes are of one step, resident ones included."""

    name: str
    note: str = ""
    dtype: str = ""
    error: str = ""
    difference: float | None = None
    where: str = ""
    tolerance: float = 0.0
    step_graphs: int = 0
    other_graphs: int = 0
    reasons: list[str] = field(default_factory=list)
    warnings: int = 0
    predicted: int | None = None
    predicted_resident: int | None = None
    measured: int | None = None
    peak: int = 0
    eager_peak: int = 0
    resident: int = 0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.difference is not None and self.difference <= self.tolerance

    @property
    def whole(self) -> bool:
        return self.step_graphs > 0 and not self.other_graphs and not self.reasons

    @property
    def said(self) -> bool:
        """Whether a step that is not captured whole says so, and says it once."""
        return self.whole or self.warnings == 1

    @property
    def prediction_error(self) -> float | None:
        """Predicted total peak against the measured one, as a share of the measured one."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def transient_error(self) -> float | None:
        """The same of what the step adds to its inputs."""
        if not self.predicted or not self.measured:
            return None
        measured = self.measured - self.predicted_resident
        return (self.predicted - self.predicted_resident) / measured - 1 if measured > 0 else None


def train(case: Case, compile: Callable = lambda step: step) -> tuple[dict[str, Any], Measurement]:
    """Everything that training changes, and the memory of one step."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        torch.manual_seed(0)
        training = case.build()
        step = compile(training.step)
        torch.manual_seed(1)
        results, memory = [], None
        for i in range(case.steps):
            batch = training.batch(i)
            if i == min(MEASURED, case.steps - 1):
                memory = measure(step, *batch, resident=(training.modules, training.optimizers))
                result = memory.result
            else:
                result = step(*batch)
            results.append(plain(result))
            training.after(i)
            del result
    finally:
        torch.set_default_dtype(default)
    changed = {
        "results": results,
        "model": [plain(dict(m.state_dict())) for m in training.modules],
        "gradients": [{n: plain(p.grad) for n, p in m.named_parameters()} for m in training.modules],
        "optimizer": [plain(o.state_dict()) for o in training.optimizers],
        "random": torch.get_rng_state(),
    }
    return changed, memory


def largest_difference(a: Any, b: Any, path: str = "") -> tuple[float, str]:
    """The largest difference between two nests relative to their tensor's largest value, and
    where it is. What is not a number has to be so in both."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf"), path
        a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
        same = (a == b) | (a.isnan() & b.isnan())
        if same.all():
            return 0.0, path
        difference = float((a - b)[~same].abs().max())
        scale = float(torch.maximum(a.abs(), b.abs()).nan_to_num(posinf=0.0).max())
        return difference / max(scale, 1e-8) if difference == difference else float("inf"), path
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(a[k], b[k], f"{path}.{k}") for k in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b))]
    elif isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / max(abs(a), abs(b), 1e-8), path
    else:
        return (0.0 if type(a) is type(b) and a == b else float("inf")), path
    return max((largest_difference(*pair) for pair in pairs), default=(0.0, path))


def has_nan(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isnan().any())
    return any(map(has_nan, value.values() if isinstance(value, dict) else value)) if isinstance(
        value, (dict, list)) else False


def fill_zeros(model: nn.Module) -> None:
    """Give parameters that start at zero random values.

    The gradient of some of them is zero but for rounding (the bias of an attention's keys), and
    a tensor that holds nothing but rounding cannot be compared.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.02)


def plain(value: Any) -> Any:
    """Copies of all tensors in a nest of dicts and lists, without autograd."""
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().clone() if value.layout is not torch.strided else value.detach().clone()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def run(case: Case, **options: Any) -> Row:
    """Both trainings, compared, memopt's with `options`. An exception makes a row too."""
    start = time.perf_counter()
    row = Row(case.name, case.note, str(case.dtype).removeprefix("torch."),
              tolerance=case.tolerance or TOLERANCE[case.dtype])
    forget()
    try:
        expected, memory = train(case)
        row.note += "; NaN in eager too" * has_nan(expected)
        row.eager_peak, row.resident = memory.peak_bytes, memory.resident_bytes
        del memory
    except Exception as error:
        row.error = f"eager: {describe(error)}"
        row.seconds = time.perf_counter() - start
        return row
    made: list = []
    try:
        with mock.patch.object(driver, "remember", lambda frame, record: made.append(record)), \
                mock.patch.object(driver, "forget", lambda frame, record: made.remove(record)), _Lines() as lines:
            got, memory = train(case, lambda step: torch.compile(
                step, backend="memopt", options={"lowering": "eager", **options}))
        row.peak = memory.peak_bytes
        row.difference, row.where = largest_difference(expected, got)
    except Exception as error:
        row.error = describe(error)
    row.warnings = len(lines.lines)
    steps = [record for record in made if record.kind == "step"]
    row.step_graphs, row.other_graphs = len(steps), len(made) - len(steps)
    row.reasons = list(dict.fromkeys(r.reason for r in made if r.reason)) or lines.lines[:1]
    measured = [record for record in steps if record.measured_peak_bytes]
    if measured:
        largest = max(measured, key=lambda record: record.measured_peak_bytes)
        row.predicted, row.measured = largest.predicted_peak_bytes, largest.measured_peak_bytes
        row.predicted_resident = largest.after.resident_bytes
    row.seconds = time.perf_counter() - start
    forget()
    return row


def forget() -> None:
    torch._dynamo.reset()
    gc.collect()


def describe(error: BaseException) -> str:
    """Type and first lines of an exception, and of what caused it."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:300]}"


class _Lines(logging.Handler):
    """The lines in which memopt says that a step is not captured whole."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "not captured whole" in record.getMessage():
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Lines:
        logging.getLogger("memopt_compile").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("memopt_compile").removeHandler(self)
