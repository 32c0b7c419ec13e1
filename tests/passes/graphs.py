"""StepGraphs to try passes on: captured from real training steps, or made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from memopt_compile import build, driver, micro_batches, optim, programs
from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.metadata import check_metadata
from memopt_compile.step_graph import Role, StepGraph


def captured(step_fn: Callable, *args: Any, lowering: str = "eager") -> StepGraph:
    """The graph of `step_fn` as passes first see it."""
    steps: list[StepGraph] = []

    def lower(step: StepGraph, record: Any) -> Callable:
        steps.append(step)
        return eager.lower(step)

    torch._dynamo.reset()
    with mock.patch.object(programs, "fitted", lower):
        torch.compile(step_fn, backend=driver.backend, options={"lowering": lowering})(*args)
    (step,) = steps
    return step


def adama(model: nn.Module, batch: Tensor, n: int, **settings: Any) -> StepGraph:
    """A step of AdamA that folds the gradients of `n` micro-batches."""
    opt = optim.AdamA(model.parameters(), **settings)

    def step(x: Tensor) -> Tensor:
        for (xs,) in micro_batches(n, x):
            loss = model(xs).square().mean() / n
            loss.backward()
            opt.accumulate()
        opt.step()
        return loss

    return captured(step, batch)


def mlp(layers: int = 6, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(width, 4)).double()


def ordinary_step(model: nn.Module, opt: torch.optim.Optimizer) -> Callable:
    """Forward, backward, update."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def training_step(
    model: nn.Module,
    optimizer: type = torch.optim.AdamW,
    *,
    batch: int = 4,
    width: int = 32,
    clip: float | None = None,
    micro_batches: int = 1,
    keep_gradients: bool = False,
    lowering: str = "eager",
    **settings: Any,
) -> StepGraph:
    """The captured step of an ordinary loop."""
    opt = optimizer(model.parameters(), lr=0.1, **settings)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = F.cross_entropy(model(xs), ys)
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        if not keep_gradients:
            opt.zero_grad()
        return loss

    x = torch.randn(batch, width, dtype=torch.float64)
    return captured(step, x, torch.zeros(batch, dtype=torch.int64), lowering=lowering)


def by_hand(fn: Callable, *inputs: tuple[str, Tensor]) -> StepGraph:
    """The step that `fn` computes. Each input is (letter of its `Role`, value); see `seed`."""
    module = make_fx(fn, tracing_mode="fake")(*[value for _, value in inputs])
    # As AOTAutograd does, keep what writes and drop nothing else.
    labels = {
        "p": "p",
        "s": "opt.state[0]",
        "g": "p.grad",
        "b": "_buffers[0]",
        "x": "x",
        "n": ".param_groups[0]['lr']",
    }
    origin = [(labels[letter], value, letter == "p") for letter, value in inputs]
    output = module.graph.output_node()
    if not isinstance(output.args[0], (list, tuple)):
        output.args = ((output.args[0],),)
    return build.step_graph(module, origin)


def seed(loss: Tensor) -> Tensor:
    """In `by_hand`: the backward of `loss` begins."""
    return torch.ops.memopt.seed(loss)


def gradient(value: Tensor) -> Tensor:
    """In `by_hand`: `value` is the whole gradient of a parameter."""
    return torch.ops.memopt.gradient(value)


def two_layers() -> StepGraph:
    """Two products with a tanh between, forward and backward by hand."""
    def layer(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.mm(x, p)
        active = torch.tanh(hidden)
        loss = torch.mm(active, q).sum()
        upstream = torch.ops.aten.expand(seed(loss), (8, 4))
        of_q = gradient(torch.mm(active.t(), upstream))
        of_p = gradient(torch.mm(x.t(), torch.mm(upstream, q.t()) * torch.cos(hidden)))
        return loss, of_q, of_p

    return by_hand(layer, *((role, torch.rand(shape, dtype=torch.float64))
                            for role, shape in (("p", (4, 4)), ("p", (4, 4)), ("x", (8, 4)))))


def values_for(step: StepGraph) -> list[Any]:
    """Inputs for one run: positive, since some are variances, and small class numbers."""
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for node, given in zip(step.placeholders, step.inputs, strict=True):
        fake = node.meta["val"]
        if not isinstance(fake, Tensor):
            values.append(int(fake))
        elif not fake.is_floating_point():
            values.append(torch.ones(fake.shape, dtype=fake.dtype))
        elif given.role is Role.STATE and fake.dim() == 0:
            values.append(torch.full((), 3.0, dtype=fake.dtype))
        else:
            value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            values.append(value.copy_(torch.rand(fake.shape, generator=generator)))
    return values


def outcome(run: Callable, values: Sequence[Any]) -> list[Any]:
    """What `run` returns for copies of `values`, and what it leaves in them."""
    torch.manual_seed(0)
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in values]
    returned = run(list(inputs))
    assert_own_storage(returned, inputs)
    return [*returned, *inputs]


def assert_own_storage(returned: Sequence[Any], inputs: Sequence[Any]) -> None:
    places = [v.untyped_storage().data_ptr() for v in (*returned, *inputs) if isinstance(v, Tensor)]
    assert len(places) == len(set(places)), "results share a storage"


def check(step: StepGraph, *passes: Any, slack: int = 0) -> tuple[int, int]:
    """Run `passes`; numbers stay bitwise equal, the step sound, the peak no higher.

    `slack` is for the bytes of 0-dim tensors made once for many readers. Returns the transient peaks before and after.
    """
    values = values_for(step)
    expected = outcome(eager.lower(step), values)
    before = timeline(step).transient_peak_bytes
    for each in passes:
        assert each.requires(step) is None
        each.run(step)
        step.verify()
        check_metadata(step)
        assert each.ensures(step) is None
    got = outcome(eager.lower(step), values)
    for a, b in zip(expected, got, strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        else:
            assert a == b
    after = timeline(step).transient_peak_bytes
    assert after <= before + slack
    return before, after
