"""Training with the whole model memory in low precision: LPMM's algorithms, written out again."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt
from memopt_compile import optim, records
from memopt_compile.errors import OptimizerError
from memopt_compile.quantization.named import LINEAR, moment
from memopt_compile.quantization.operators import decode, encode, few_slabs

SIZE, STEPS = (53, 40), 4  # 2,120 elements: a whole group and a tail


def parameter(bits=12, rounding="stochastic", size=SIZE, **settings):
    torch.manual_seed(0)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(size) / 8)
    return memopt.quantize_parameters_(layer, bits, rounding=rounding, **settings).weight


def gradients(count, size=SIZE):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for _ in range(count)]


class Q:
    """A value that is stored: `x` is what is read, and setting it rounds it, stochastically if `seed`."""

    def __init__(self, x, form, draws):
        self.form, self.draws, self.shape = form, draws, x.shape
        self.set(x, form._replace(seed=None))

    def set(self, x, form=None):
        self.parts = encode(x, form or self.form, self.draws)
        self.x = decode(self.parts, self.form, x.numel()).view(self.shape)


SEEDS = {"momentum_buffer": 0x70E3, "exp_avg": 0x11C5, "exp_avg_sq": 0x2B39, "gradient": 0x5A27}


def stored(p, name, rounding, signed=True):
    seed = None if rounding == "nearest" else SEEDS[name]
    form = LINEAR[8] if name == "gradient" else moment(8, signed)
    return Q(torch.zeros(p.shape), form._replace(block=2048, seed=seed), int(p.draws))


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("bits", [8, 12])
def test_sgdm_is_algorithm_1(bits, micro_batches, rounding):
    p = parameter(bits, rounding)
    opt = optim.SGD([p], lr=0.05, momentum=0.9, state_bits=8, gradient_bits=8)
    theta = Q(p.detach().dequantize(), p.form, int(p.draws))
    g, m = stored(p, "gradient", rounding), stored(p, "momentum_buffer", rounding)
    assert torch.equal(theta.x, p.dequantize())
    draws = int(p.draws)
    for step in range(STEPS):
        for i, grad in enumerate(gradients(micro_batches)):
            p.grad = grad * (step + 1)
            if i < micro_batches - 1:
                opt.accumulate()
                assert p.grad is None
            draws += 1
            g.draws = draws
            g.set(grad * (step + 1) + (g.x if i else 0))  # line 5
        opt.step()
        draws += 1
        m.draws, theta.draws = draws, theta.draws + 1
        full = 0.9 * m.x + g.x
        m.set(full)  # line 7
        theta.set(theta.x - 0.05 * full)  # line 8, with m before it is rounded
        state = opt.state[p]
        for name, kept in (("gradient", g), ("momentum_buffer", m)):
            assert mostly_equal(kept.parts[0], state[name])
            kept.parts = [state[name], state[f"{name}_scale"]]
            kept.x = decode(kept.parts, kept.form, p.numel()).view(p.shape)
        assert mostly_equal(theta.parts[0], p.low)
        theta.x = p.detach().dequantize()


def mostly_equal(a, b):
    """But where float32 rounds sums of another order otherwise, just where a number is drawn."""
    return a.shape == b.shape and (a != b).double().mean() < 2e-3


@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW])
def test_adam_is_that_of_appendix_b(make):
    p = parameter(8)
    opt = make([p], lr=0.01, weight_decay=0.1, state_bits=8, gradient_bits=8)
    theta = Q(p.detach().dequantize(), p.form, int(p.draws))
    g, m, v = (stored(p, name, "stochastic", signed) for name, signed in (
        ("gradient", True), ("exp_avg", True), ("exp_avg_sq", False)))
    draws = int(p.draws)
    for t, grad in enumerate(gradients(STEPS), start=1):
        p.grad = grad.clone()
        opt.step()
        g.draws = draws + 1
        g.set(grad)
        m.draws = v.draws = draws = draws + 2
        theta.draws += 1
        descent, weight = g.x, theta.x
        if make is optim.Adam:
            descent = descent + 0.1 * weight
        else:
            weight = weight * (1 - 0.01 * 0.1)
        first = m.x.lerp(descent, 0.1)
        second = 0.999 * v.x + 0.001 * descent**2
        root = (second / (1 - 0.999**t)).sqrt() + 1e-8
        m.set(first)
        v.set(second)
        theta.set(weight - 0.01 * (first / (1 - 0.9**t)) / root)
        state = opt.state[p]
        for name, kept in (("gradient", g), ("exp_avg", m), ("exp_avg_sq", v)):
            assert mostly_equal(kept.parts[0], state[name])
            kept.x = decode([state[name], state[f"{name}_scale"]], kept.form, p.numel()).view(p.shape)
        assert mostly_equal(theta.parts[0], p.low)
        theta.x = p.detach().dequantize()


def test_bits_of_all_model_memory():
    p = parameter(12, size=(1024, 512))
    opt = optim.SGD([p], lr=0.1, momentum=0.9, state_bits=8, gradient_bits=8)
    p.grad = torch.ones(1024, 512)
    opt.step()
    bits = {name: 8 * value.nbytes / p.numel() for name, value in opt.state[p].items()}
    bits["parameter"] = sum(8 * part.nbytes / p.numel() for part in p.parts)
    assert sum(bits.values()) <= 28.1
    assert sum(b for name, b in bits.items() if "gradient" not in name) <= 20.1


def test_slabs_store_what_the_whole_does(monkeypatch):
    from memopt_compile.optim import slabs

    results = []
    for elements in (slabs.ELEMENTS, 4096):
        monkeypatch.setattr(slabs, "ELEMENTS", elements)
        p = parameter(size=(101, 203))
        opt = optim.AdamW([p], lr=0.01, state_bits=8, gradient_bits=8)
        for grad in gradients(3, (101, 203)):
            p.grad = grad
            opt.accumulate()
        opt.step()
        results.append([*p.parts, *(v for _, v in sorted(opt.state[p].items()) if torch.is_tensor(v))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("make", [
    lambda p: optim.SGD(p, lr=0.05, momentum=0.9, state_bits=8, gradient_bits=8),
    lambda p: optim.AdamA(p, lr=0.01, state_bits=8), lambda p: optim.AdamW(p, lr=0.01)])
def test_restart_goes_on_bit_by_bit(make):
    p = parameter()
    opt, copies = make([p]), []
    for i, grad in enumerate(gradients(6)):
        if i == 3:
            file = io.BytesIO()
            torch.save((opt.state_dict(), p.detach()), file)
            file.seek(0)
            state, weights = torch.load(file, weights_only=True)
            q = parameter()
            with torch.no_grad():
                q.copy_(weights)
            other = make([q])
            other.load_state_dict(state)
            copies = [(q, other)]
        for each, its in [(p, opt), *copies]:
            each.grad = grad.clone()
            its.step()
    assert all(torch.equal(a, b) for a, b in zip(p.parts, q.parts))


def test_restart_within_a_mini_batch():
    """The sum of the micro-batches so far is in the checkpoint."""
    def make(bits=8):
        return (p := parameter()), optim.SGD([p], lr=0.05, momentum=0.9, state_bits=8, gradient_bits=bits)

    (p, opt), (q, other) = make(), make()
    first, second = gradients(2)
    p.grad = first
    opt.accumulate()
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, its in ((p, opt), (q, other)):
        each.grad = second.clone()
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(p.parts, q.parts))
    p.grad = first
    opt.accumulate()
    with pytest.raises(OptimizerError, match="folded"):  # no place for the sum
        make(32)[1].load_state_dict(opt.state_dict())


def test_a_checkpoint_of_full_precision_loads():
    plain = nn.Parameter(torch.randn(SIZE))
    plain.grad = torch.ones(SIZE)
    old = optim.SGD([plain], lr=0.1, momentum=0.9)
    old.step()
    p = parameter()
    opt = optim.SGD([p], lr=0.1, momentum=0.9, state_bits=8, gradient_bits=8)
    opt.load_state_dict(old.state_dict())
    p.grad = torch.ones(SIZE)
    opt.step()
    again = optim.SGD([plain], lr=0.1, momentum=0.9)
    again.load_state_dict(opt.state_dict())
    assert set(again.state[plain]) == {"momentum_buffer"}
    assert (again.state[plain]["momentum_buffer"] - 1.9).abs().max() < 0.02


def test_others_are_refused():
    for make in (optim.CAME, optim.Adafactor):
        with pytest.raises(OptimizerError, match="low precision"):
            make([parameter()], lr=0.1)
    for make in (optim.CAME, optim.AdamA):
        with pytest.raises(OptimizerError, match="gradients to keep"):
            make([nn.Parameter(torch.ones(3))], lr=0.1, gradient_bits=8)
    with pytest.raises(OptimizerError, match="gradient_bits"):
        optim.SGD([parameter()], lr=0.1, gradient_bits=12)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_torchs_optimizers_train(make):
    p = parameter(12)
    plain = nn.Parameter(p.detach().dequantize().clone())
    for each in (p, plain):
        opt = make([each], lr=0.01)
        for grad in gradients(5):
            each.grad = grad.clone()
            opt.step()
    scale = plain.abs().max() / 2047
    assert (p.dequantize() - plain).abs().max() < 12 * scale
    assert abs(float((p.dequantize() - plain).mean())) < scale


@pytest.mark.parametrize("lowering", [None, "eager"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_optimizers_lose_no_small_updates_of_bfloat16(make, lowering):
    """Which has no number between a weight and one of 12 bits beside it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = memopt.quantize_parameters_(nn.Linear(16, 64, bias=False).bfloat16())
    p, before = layer.weight, layer.weight.detach().float().dequantize()
    steps = 2047 / float(p.scales[0])
    opt = make([p], lr=0.05 / steps, **({"weight_decay": 0.0} if make is torch.optim.AdamW else {}))

    def step(x):
        (layer(x).sum() / 64).backward()  # a gradient of ones
        opt.step()
        opt.zero_grad()

    run = memopt.compile(step, lowering=lowering) if lowering else step
    for _ in range(40):
        run(torch.ones(64, 16, dtype=torch.bfloat16))
    moved = float((before - p.detach().float().dequantize()).mean() * steps)
    assert moved == pytest.approx(2.0, abs=0.2)


def test_skipping_what_is_not_finite():
    p, twin = parameter(), parameter()
    opt = optim.SGD([p], lr=0.1, momentum=0.9, state_bits=8, skip_nonfinite=True)
    p.grad = torch.full(SIZE, float("nan"))
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(p.parts, twin.parts))


def trained(lowering, make, micro_batches, steps=3, layers=2, dtype=torch.float32, **settings):
    """Losses and parts after some steps of a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 4)) if layers == 1 else nn.Sequential(
        nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 4))
    memopt.quantize_parameters_(model.to(dtype), **settings)
    opt = make(model.parameters())

    def step(x, y):
        for xs, ys in memopt.micro_batches(micro_batches, x, y):
            loss = F.cross_entropy(model(xs), ys) / micro_batches
            loss.backward()
            if micro_batches > 1:
                opt.accumulate()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run, before = step, len(records.compilations(step.__code__))
    if lowering:
        torch._dynamo.reset()
        run = torch.compile(step, backend="memopt", options={"lowering": lowering})
    generator = torch.Generator().manual_seed(1)
    losses = [float(run(torch.randn(12, 60, generator=generator).to(dtype),
                        torch.randint(4, (12,), generator=generator))) for _ in range(steps)]
    if lowering:
        (record,) = records.compilations(step.__code__)[before:]
        assert record.kind == "step" and record.reason is None
        assert record.predicted_peak_bytes == record.measured_peak_bytes
        updates = sum(n for name, n in record.step.op_counts().items() if name.startswith("quantized_update"))
        assert (updates >= 2 * layers) is (type(opt).__module__ != torch.optim.AdamW.__module__)
    return losses, [part for p in model.parameters() for part in p.parts], opt


WAYS = {
    "SGDM": (lambda p: optim.SGD(p, lr=0.05, momentum=0.9, state_bits=8), 1),
    "SGDM, 8-bit gradients": (lambda p: optim.SGD(
        p, lr=0.05, momentum=0.9, state_bits=8, gradient_bits=8), 6),  # a loop that is shortened
    "AdamW": (lambda p: optim.AdamW(p, lr=0.01, state_bits=8, skip_nonfinite=True), 1),
    "AdamA": (lambda p: optim.AdamA(p, lr=0.01, state_bits=8), 3),
    "torch's AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), 1),
}


@pytest.mark.parametrize(("make", "micro_batches"), WAYS.values(), ids=WAYS)
@pytest.mark.table(4)
def test_captured_step_is_the_eager_one(make, micro_batches):
    eager, parts, _ = trained(None, make, micro_batches)
    losses, ours, _ = trained("eager", make, micro_batches)
    assert losses == pytest.approx(eager, rel=2e-5)
    assert all(mostly_equal(a, b) if a.dtype == torch.uint8 else torch.allclose(a, b, rtol=1e-5)
               for a, b in zip(parts, ours) if a.numel() > 500)
    assert all(torch.equal(a, b) for a, b in zip(parts, ours) if a.dtype == torch.int64)


def test_captured_parameters_of_bfloat16_are_decoded_to_float32():
    """By the update, which is an operator: to bfloat16 it would round them at each step, and lose small updates."""
    make, micro_batches = WAYS["SGDM"]
    (_, parts, _), (_, ours, _) = (trained(lowering, make, micro_batches, steps=2, layers=1, dtype=torch.bfloat16)
                                   for lowering in (None, "eager"))
    assert all(map(mostly_equal, parts[:2], ours[:2]))


@pytest.mark.inductor
def test_captured_step_is_the_eager_one_with_inductor():
    make, micro_batches = WAYS["SGDM"]
    eager, parts, _ = trained(None, make, micro_batches, layers=1)
    losses, ours, _ = trained("inductor", make, micro_batches, layers=1)
    assert losses == pytest.approx(eager, rel=2e-5)
    assert all(((a.int() - b.int()).abs() > 0).double().mean() < 0.01 for a, b in zip(parts, ours)
               if a.dtype == torch.uint8)


def test_an_update_holds_few_slabs_and_the_first_ones_tell_how_much(monkeypatch):
    from memopt_compile.optim import one_operator, slabs

    monkeypatch.setattr(slabs, "ELEMENTS", 16384)
    elements, held = 14 * 4096 + 77, []  # 15 slabs, of two groups each
    p = parameter(size=(elements,))
    opt = optim.AdamW([p], lr=0.01, state_bits=8)
    p.grad = torch.randn(elements)
    opt.step()
    state = opt.state[p]
    args = [list(p.parts), [p.grad], list(state.values()), "AdamW _update_in_slabs", " ".join(state),
            "lr betas betas eps weight_decay decoupled_weight_decay amsgrad state_bits gradient_bits maximize",
            [0.01, 0.9, 0.999, 1e-8, 0.01, 1, 0, 8, 32, 0], [], [12, 2048, 0, 0, elements], torch.float32]
    for scope in (few_slabs, contextlib.nullcontext):
        with scope(), torch.no_grad():
            measured = memopt.measure(one_operator.quantized_update, *args, resident=())
        held.append(measured.transient_peak_bytes - measured.end_bytes)
    assert held[0] == held[1] < 20 * 4096 * 4
    state["step"].sub_(1)  # which is counted outside
    opt.step()
    new = [*p.parts, *state.values()]  # is what the operator has given
    assert all(map(torch.equal, measured.result, new))


def test_a_copy_trains_on_its_own():
    p = parameter()
    q = copy.deepcopy(p)
    q.grad = torch.ones(SIZE)
    optim.SGD([q], lr=0.1).step()
    assert int(q.draws) == int(p.draws) + 1 and not torch.equal(p.low, q.low)
