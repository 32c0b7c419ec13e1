"""Train a row twice, eager and compiled, and compare everything that training changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from rows import CLASSES, WIDTH, Loop
from torch import Tensor

from memopt_compile import driver

STEPS = 7


def train(build: Callable[[], Loop], compile: Callable | None = None, steps: int = STEPS,
          dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Results, parameters, gradients, buffers and optimizer state after `steps` steps."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        loop = build()
        step = loop.wrap(loop.step, compile) if compile else loop.wrap(loop.step, lambda f: f)
        generator = torch.Generator("cpu").manual_seed(1)
        torch.manual_seed(2)
        results = []
        for i in range(steps):
            x = torch.randn(loop.batch(i), WIDTH, generator=generator, dtype=dtype, device="cpu")
            y = torch.randint(CLASSES, (loop.batch(i),), generator=generator, device="cpu")
            x, y = (t.to(torch.get_default_device()) for t in (x, y))
            results.append(_plain(step(x, y, *loop.arguments(i))))
            loop.after(i)
    finally:
        torch.set_default_dtype(default)
    return {
        "results": results,
        "state": [{k: v.clone() for k, v in m.state_dict().items()} for m in loop.modules],
        "gradients": [{n: None if p.grad is None else p.grad.clone() for n, p in
                       m.named_parameters()} for m in loop.modules],
        "optimizers": [_plain(o.state_dict()["state"]) for o in loop.optimizers],
        "random": torch.get_rng_state(),
    }


def compiled(build: Callable[[], Loop], lowering: str = "eager", dtype: torch.dtype = torch.float64,
             until: int = STEPS, **options: Any) -> tuple[dict[str, Any], list]:
    """The same with the step compiled, and the compilations that it took, none after `until` calls."""
    torch._dynamo.reset()
    made: list = []
    calls: list[int] = []

    def counted() -> Loop:
        loop = build()
        after = loop.after
        return dataclasses.replace(loop, after=lambda i: (after(i), calls.append(i)))

    def compile(step: Any) -> Any:
        return torch.compile(step, backend="memopt", options={"lowering": lowering, **options})

    def remember(frame: Any, record: Any) -> None:
        made.append(record)
        assert len(calls) < until, f"call {len(calls) + 1} made a graph"

    with mock.patch.object(driver, "remember", remember), \
            mock.patch.object(driver, "forget", lambda frame, record: made.remove(record)):
        return train(counted, compile, dtype=dtype), made


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def largest_difference(a: Any, b: Any, path: str = "") -> tuple[float, str]:
    """The largest relative difference between two nests, and where it is."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
            return float("inf"), path
        a, b = a.double(), b.double()
        scale = float(torch.maximum(a.abs(), b.abs()).max()) if a.numel() else 0.0
        difference = float((a - b).abs().max()) if a.numel() else 0.0
        return (difference / max(scale, 1e-8) if difference == difference else float("inf")), path
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys():
            return float("inf"), path
        pairs = [(a[k], b[k], f"{path}.{k}") for k in a]
    elif isinstance(a, list):
        if not isinstance(b, list) or len(a) != len(b):
            return float("inf"), path
        pairs = [(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b))]
    elif isinstance(a, float):
        return abs(a - b) / max(abs(a), abs(b), 1e-8), path
    else:
        return (0.0 if a == b else float("inf")), path
    return max((largest_difference(*pair) for pair in pairs), default=(0.0, path))
