"""A compiled step captures each optimizer whole, once for a schedule, and equals eager."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import MAKERS

sys.path.insert(0, str(Path(__file__).parents[1] / "capture"))
from harness import largest_difference, train
from loops import Loop, loop, mlp, plain
from temporaries import captured_bytes

import memopt_compile as memopt
from memopt_compile import driver
from memopt_compile.optim import base, low_bit, one_operator, slabs
from memopt_compile.optim.base import Optimizer

STEPS = 12


def network() -> nn.Module:
    model = mlp(nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 3, 3, padding=1), nn.Flatten())
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model


def scheduled(make) -> Loop:
    model = network()
    opt = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    return plain(model, opt, after=lambda i: schedule.step())


def accumulating(**settings) -> Loop:
    model = network()
    return in_parts(model, memopt.optim.AdamA(model.parameters(), lr=0.02, **settings))


def in_parts(model, opt) -> Loop:
    """Three micro-batches, each folded into the states of `opt` by itself."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)

    def step(x, y):
        total = 0.0
        for some, labels in memopt.micro_batches(3, x, y):
            loss = F.cross_entropy(model(some), labels) / 3
            loss.backward()
            opt.accumulate()
            total = total + loss.detach()
        opt.step()
        return total

    return loop(model, opt, step, after=lambda i: schedule.step())


def in_one_graph(build, dtype=torch.float64, tolerance=1e-9, seen=lambda result: result):
    torch._dynamo.reset()
    expected = train(build, steps=STEPS, dtype=dtype)
    made = []
    with mock.patch.object(driver, "remember", lambda frame, record: made.append(record)):
        got = train(build, lambda step: torch.compile(
            step, backend="memopt", options={"lowering": "eager"}), steps=STEPS, dtype=dtype)
    difference, where = largest_difference(seen(expected), seen(got))
    assert difference <= tolerance, f"{where}: {difference:.3e}"
    assert [(record.kind, record.reason) for record in made] == [("step", None)]
    return made


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.table(4)
def test_every_optimizer(make):
    in_one_graph(lambda: scheduled(make))


def test_accumulation_over_micro_batches():
    in_one_graph(lambda: accumulating(v_scale=2.0, micro_batches=3, amsgrad=True, weight_decay=0.1))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "CAME", "AdamA"])
def test_nothing_happens_without_gradients(name):
    torch._dynamo.reset()
    p = nn.Parameter(torch.ones(3))
    opt = MAKERS[name]([p])

    def step(x):
        opt.step()
        return x.sum()

    compiled = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    for _ in range(2):
        assert compiled(torch.ones(3)) == 3
    assert torch.equal(p, torch.ones(3)) and not opt.state


def test_tensor_rate():
    def build():
        built = scheduled(MAKERS["Adafactor"])
        group = built.optimizers[0].param_groups[0]
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        return built

    in_one_graph(build)


def test_float32_with_momentum_that_changes():
    def build():
        model = network()
        opt = MAKERS["Adam"](model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=20)
        return plain(model, opt, after=lambda i: schedule.step())

    in_one_graph(build, torch.float32, 1e-4)


SKIPPING = {name: (MAKERS[name], {}) for name in ("SGD dampened", "CAME", "AdamA")} | {
    "CAME, one operator": (MAKERS["CAME"], {"LARGE": 1}), "Adafactor, one operator": (MAKERS["Adafactor"], {"LARGE": 1}),
    "AdamW, 8 bits": (lambda ps: memopt.optim.AdamW(ps, lr=0.02, state_bits=8, max_norm=0.1), {}),
    "AdamA, 4 bits": (lambda ps: memopt.optim.AdamA(ps, lr=0.02, state_bits=4), {})}


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.table(6)
def test_not_finite_gradients_are_skipped(name, monkeypatch):
    make, setting = SKIPPING[name]
    monkeypatch.setattr(base, "SMALL", 1)
    monkeypatch.setattr(low_bit, "SMALL", 1)
    for each, value in setting.items():
        monkeypatch.setattr(one_operator, each, value)

    def build():
        model = network()
        opt = make(model.parameters())
        opt.param_groups[0]["skip_nonfinite"] = True

        def step(x, y, factor):
            loss = (F.cross_entropy(model(x), y) * factor).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach().isnan()

        return loop(model, opt, step, arguments=lambda i: (torch.tensor(
            float("nan") if i in (0, 4) else 1.0),))

    record, = in_one_graph(build)
    in_place = record.step.op_counts().get("quantized_update_", 0)
    assert updates(record) == in_place == 6 * ("one" in name or "bits" in name)


def test_one_array_beside_the_state():
    """The gradient is made once: `split_live_ranges` would make it twice, to save 8 bytes."""
    p = nn.Parameter(torch.randn(256, 256))
    assert captured_bytes(p, memopt.optim.AdamW([p]), "eager") <= p.nbytes + 64


def test_hooks_that_fold_are_left_to_eager():
    """A step whose parameters have them runs by the ordinary path, and no hook is compiled there."""
    model = network()
    opt = memopt.optim.AdamA(model.parameters())
    handle = opt.accumulate_in_backward()

    def step(x):
        model(x).square().mean().backward()
        opt.step()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    torch._dynamo.utils.clear_compilation_metrics()
    compiled(torch.randn(4, 12))
    handle.remove()
    frames = {frame.co_name for frame in torch._dynamo.utils.get_compilation_metrics()}
    assert "step" in frames and not frames & {"_hook", "_fold_and_free", "_fold_in_slabs"}
    assert all(p.grad is None for p in model.parameters())


class Normalized(Optimizer):
    """A user's, of which no element goes its way alone."""

    required = frozenset({"lr"})
    state_names = frozenset({"longest"})

    def __init__(self, params, lr):
        super().__init__(params, {}, lr=lr, weight_decay=0.0)

    def new_state(self, p, group):
        return {"longest": torch.zeros((), dtype=p.dtype)}

    def update(self, p, grad, state, group):
        state["longest"].copy_(torch.maximum(state["longest"], grad.norm()))
        p.sub_(grad / state["longest"].clamp(min=1e-9) * self.rate(group))


def test_a_users_own_that_is_not_elementwise(all_large):
    record, = in_one_graph(lambda: scheduled(lambda p: Normalized(p, lr=0.02)))
    assert updates(record) == 0


@pytest.fixture
def all_large(monkeypatch):
    monkeypatch.setattr(one_operator, "LARGE", 1)


def updates(record) -> int:
    return sum(n for name, n in record.step.op_counts().items() if name.startswith("quantized_update"))


LARGE = {name: MAKERS[name] for name in ("CAME", "CAME auto", "Adafactor")} | {
    "Adafactor dims": lambda p: memopt.optim.Adafactor(p, eps=(1e-9, 1e-3), factor_dims="auto", maximize=True)}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_large_updates_in_means_are_one_operator(make, all_large):
    record, = in_one_graph(lambda: scheduled(make), tolerance=1e-12)
    assert updates(record) == record.step.op_counts()["quantized_update_"] > 0  # all in place


def test_large_parts_are_one_operator(all_large):
    def build():
        model = network()
        return in_parts(model, memopt.optim.CAME(model.parameters(), lr=0.02, micro_batches=3))

    record, = in_one_graph(build, tolerance=1e-12)
    assert updates(record) == record.step.op_counts()["quantized_update_"] > 0


def test_updates_of_weights_in_channels_last_are_one_operator(all_large, monkeypatch):
    """In means, and in few bits; not those of a part of a larger array."""
    monkeypatch.setattr(low_bit, "SMALL", 16)

    def of(make):
        weight = nn.Parameter(torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last))
        part = nn.Parameter(torch.randn(8, 8)[:, :5])
        model = nn.ParameterList([weight, part])
        opt = make(model)

        def step(x, y):
            loss = (weight.sum((2, 3)) @ x[:6]).square().mean() + (part @ x[:5, :3]).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return loop(model, opt, step)

    for make in (MAKERS["CAME"], lambda ps: memopt.optim.AdamW(ps, lr=0.02, state_bits=8)):
        record, = in_one_graph(partial(of, make))
        assert updates(record) == record.step.op_counts()["quantized_update_"] == 1


def test_large_updates_of_other_compilers_are_not(all_large):
    """They would keep the operator's copies."""
    ps = [nn.Parameter(torch.ones(8, 8))]
    opt, targets = memopt.optim.CAME(ps, lr=0.02), []

    def backend(gm, inputs):
        targets.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    ps[0].grad = torch.ones(8, 8)
    torch.compile(opt.step, backend=backend)()
    assert targets and not any("quantized_update" in target for target in targets)


@pytest.mark.parametrize("kind", ["CAME", "Adafactor"])
@pytest.mark.parametrize(("bits", "weight_bits"), [(32, None), (16, None), (32, 16), (32, 24)])
@pytest.mark.table(4)
def test_large_updates_hold_slabs_and_equal_eager(kind, bits, weight_bits, all_large, monkeypatch):
    monkeypatch.setattr(slabs, "ELEMENTS", 1 << 12)

    def trained(compile):
        torch._dynamo.reset()
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(512, 512).to(torch.bfloat16 if weight_bits else torch.float32))
        opt = getattr(memopt.optim, kind)([p], lr=0.01, state_bits=bits, weight_bits=weight_bits)

        def step(x):
            (p * x).sum().backward()
            opt.step()
            opt.zero_grad()

        run = compile(step)
        for _ in range(3):
            run(torch.randn_like(p))
        values = [p.detach().clone(), *(s.clone() for s in opt.state[p].values() if isinstance(s, torch.Tensor))]
        return values, memopt.measure(run, torch.randn_like(p), resident=(p, opt)).transient_peak_bytes - p.nbytes

    expected, _ = trained(lambda step: step)
    got, held = trained(lambda step: memopt.compile(step, lowering="eager"))
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
    assert held <= 16 * 4 * slabs.ELEMENTS


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize(("kind", "kept"), [("AdamA", 1), ("CAME", 2)])
@pytest.mark.table(4)
def test_gradients_are_freed_in_their_micro_batch(kind, kept, n):
    """Compiled: states stay in place, and each fold is beside its backward. A gradient is alive then, and
    CAME's update of the same size."""
    width, layers = 128, 4
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    opt = getattr(memopt.optim, kind)(model.parameters(), lr=1e-3)

    def step(x):
        for some, in memopt.micro_batches(n, x):
            (model(some).square().mean() / n).backward()
            opt.accumulate()
        opt.step()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    for _ in range(2):
        compiled(torch.randn(n, width))
    report = memopt.report(compiled)
    resident = memopt.measure(lambda: None, resident=(model, opt)).resident_bytes
    assert report.measured_peak_bytes - resident <= (kept + 0.09) * width * width * 4
