"""AdamA in the graph: Algorithm 2's numbers, one layer's gradients, and what is refused by name."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from graphs import by_hand, gradient, mlp, seed, training_step
from torch import nn

import memopt_compile as memopt
from memopt_compile import driver
from memopt_compile.errors import OptionError
from memopt_compile.passes.accumulate_in_states import AccumulateInStates
from memopt_compile.passes.canonicalize import Canonicalize

LAYERS, WIDTH, N = 2, 32, 4


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def test_golden():
    def two_batches(p, m, x):
        of_0 = gradient(x * seed(torch.sum(x * p)))
        of_1 = gradient(p * seed(torch.sum(x + p)))
        beta = torch.full((), 0.9, dtype=torch.float64)
        moment = torch.ops.memopt.fold(m, of_0 + of_1, beta, 2)
        m.copy_(moment)
        p.copy_(p - moment)

    step = by_hand(two_batches, ("p", doubles(4)), ("s", doubles(4)), ("x", doubles(4)))
    Canonicalize().run(step)
    AccumulateInStates().run(step)
    step.verify()
    assert step.text().split("backward:\n", 1)[1] == """\
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  mul_0: f64[4] = mul(x0, full_0)
  mul_1: f64[4] = mul(p0, full_0)
update:
  mul_2: f64[4] = mul(s0, 0.9)
  mul_3: f64[4] = mul(mul_0, mul_0)
  mul_4: f64[4] = mul(mul_3, 0.09999999999999998)
  add_0: f64[4] = add(mul_2, mul_4)
  mul_5: f64[4] = mul(mul_1, mul_1)
  mul_6: f64[4] = mul(mul_5, 0.09999999999999998)
  add_1: f64[4] = add(add_0, mul_6)
  copy_0: f64[4] = copy_(s0, add_1)
  sub_0: f64[4] = sub(p0, add_1)
  copy_1: f64[4] = copy_(p0, sub_0)
return None
"""


def test_nothing_to_do():
    step = training_step(mlp(2), micro_batches=2)
    text = step.text()
    AccumulateInStates().run(step)
    assert step.text() == text


def layers(dtype=torch.float64, count=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())],
                         nn.Dropout(0.2), nn.Linear(WIDTH, 4)).to(dtype)


def training(optimizer=torch.optim.AdamW, end=lambda model: None, zero_first=False, count=LAYERS,
             set_to_none=True, **settings):
    """A model of `count` layers, and a step on it in micro-batches with the optimizer of `settings`."""
    model = layers(count=count)
    opt = optimizer(model.parameters(), lr=0.01, **settings)

    def step(x, y):
        if zero_first:
            opt.zero_grad()
        total = 0.0
        for xs, ys in memopt.micro_batches(N, x, y):
            loss = F.cross_entropy(model(xs), ys) / N
            loss.backward()
            total = total + loss.detach()
        end(model)
        opt.step()
        if not zero_first:
            opt.zero_grad(set_to_none)
        return total

    return model, opt, step


def algorithm_2(decay=0.01, betas=(0.9, 0.999), sign=1, amsgrad=False, clip=lambda gs: gs):
    """The same step by AdamA's Algorithm 2 as published, with AdamW's decoupled decay."""
    model = layers()
    parameters = list(model.parameters())
    m, v, largest = ([torch.zeros_like(p) for p in parameters] for _ in range(3))
    counted = [0]

    def step(x, y):
        counted[0] += 1
        for moment, beta in ((m, betas[0]), (v, betas[1])):
            for tensor in moment:
                tensor.mul_(beta)
        total = 0.0
        for xs, ys in memopt.micro_batches(N, x, y):
            loss = F.cross_entropy(model(xs), ys) / N
            total = total + loss.detach()
            for i, g in enumerate(clip(torch.autograd.grad(loss, parameters))):
                m[i] += (1 - betas[0]) * sign * g
                v[i] += (1 - betas[1]) * g * g
        with torch.no_grad():
            for i, p in enumerate(parameters):
                largest[i] = torch.maximum(largest[i], v[i]) if amsgrad else v[i]
                unbiased = (largest[i] / (1 - betas[1] ** counted[0])).sqrt() + 1e-8
                p.mul_(1 - 0.01 * decay)
                p -= 0.01 / (1 - betas[0] ** counted[0]) * m[i] / unbiased
        return total

    return model, step


def batches(count=6):
    torch.manual_seed(1)
    return [(torch.randn(4 * N, WIDTH, dtype=torch.float64), torch.randint(4, (4 * N,)))
            for _ in range(count)]


def accumulating(step, **options):
    torch._dynamo.reset()
    return torch.compile(step, backend="memopt", fullgraph=True,
                         options={"accumulate": "optimizer_states", "lowering": "eager", **options})


@pytest.mark.parametrize("settings, same", [
    ({}, {}),
    ({"weight_decay": 0.0, "betas": (0.8, 0.9)}, {"decay": 0.0, "betas": (0.8, 0.9)}),
    ({"maximize": True}, {"sign": -1}),
    ({"amsgrad": True, "foreach": True}, {"amsgrad": True}),
    ({"optimizer": memopt.optim.AdamW}, {}),
    ({"optimizer": memopt.optim.AdamW, "maximize": True}, {"sign": -1}),
])
@pytest.mark.table(4)
def test_equals_algorithm_2(settings, same):
    model, _, step = training(**settings)
    reference, expected = algorithm_2(**same)
    compiled = accumulating(step)
    for batch in batches():
        torch.manual_seed(2)  # dropout draws as in the reference
        got = compiled(*batch)
        torch.manual_seed(2)
        torch.testing.assert_close(got, expected(*batch), rtol=1e-9, atol=0)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["gradient", "grad_outputs", "several losses"])
def test_a_backward_that_is_given_its_gradient_is_one_of_its_own(way):
    def given(x, y):
        for xs, ys in zip(x.chunk(2), y.chunk(2)):
            losses = F.cross_entropy(model(xs), ys, reduction="none")
            each = torch.full_like(losses, 1 / len(y)).detach()
            if way == "gradient":
                losses.backward(each)
                continue
            grads = (torch.autograd.grad(losses, list(model.parameters()), each) if way == "grad_outputs" else
                     torch.autograd.grad(list(losses.split(1)), list(model.parameters()), list(each.split(1))))
            for p, g in zip(model.parameters(), grads):
                p.grad = g if p.grad is None else p.grad + g
        opt.step()
        opt.zero_grad()

    def whole(x, y):
        for xs, ys in zip(x.chunk(2), y.chunk(2)):
            (F.cross_entropy(expected(xs), ys) / 2).backward()
            adama.accumulate()
        adama.step()

    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    expected = copy.deepcopy(model)
    opt, adama = torch.optim.AdamW(model.parameters(), lr=0.1), memopt.optim.AdamA(
        expected.parameters(), lr=0.1, weight_decay=0.01)
    compiled = accumulating(given)
    for _ in range(2):
        batch = torch.randn(6, 6, dtype=torch.float64), torch.randint(3, (6,))
        compiled(*batch)
        whole(*batch)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


def test_betas_and_rates_that_change_compile_nothing_again():
    model, opt, step = training()
    compiled, seen = accumulating(step), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=20)
    for batch in batches(4):
        compiled(*batch)
        schedule.step()
        seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert seen[1] == seen[-1]
    report = memopt.report(compiled)
    changes = next(dict(row.op_changes) for row in report.passes if row.name == "accumulate_in_states")
    assert changes["fold"] < 0 and "rsub.Scalar" not in changes  # which Inductor refuses behind its decompositions


def test_one_backward_is_adam_bit_for_bit():
    def outcome(**options):
        torch._dynamo.reset()
        model = mlp(2)
        opt = torch.optim.Adam(model.parameters())

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        compiled = torch.compile(step, backend="memopt", options={"lowering": "eager", **options})
        torch.manual_seed(1)
        for _ in range(3):
            compiled(torch.randn(4, 32, dtype=torch.float64))
        return model.state_dict()

    plain, folded = outcome(), outcome(accumulate="optimizer_states")
    assert all(torch.equal(plain[name], folded[name]) for name in plain)


@pytest.mark.parametrize("optimizer, settings", [
    (torch.optim.AdamW, {}), (memopt.optim.AdamW, {"max_norm": 0.01})])
@pytest.mark.table(4)
def test_gradients_of_one_layer_are_alive(optimizer, settings):
    def peak(accumulate):
        _, _, step = training(optimizer, count=4, **settings)
        compiled = accumulating(step, accumulate=accumulate)
        for batch in batches(2):
            compiled(*batch)
        report = memopt.report(compiled)
        assert report.predicted_peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.01)
        return report.measured_peak_bytes

    layer = (WIDTH * WIDTH + WIDTH) * 8
    assert peak("gradients") - peak("optimizer_states") > (4 - 2) * layer


def test_explain_plans_it():
    _, _, step = training()
    plans = [memopt.explain(step, *batches(1)[0], lowering="eager", accumulate=accumulate)
             for accumulate in ("gradients", "optimizer_states")]
    assert plans[1].predicted_peak_bytes < plans[0].predicted_peak_bytes


def test_an_option_that_capture_cannot_see_is_refused():
    _, _, step = training()
    hidden = functools.partial(driver.backend, options={
        "accumulate": "optimizer_states", "lowering": "eager"})
    with pytest.raises(OptionError, match="not seen"):
        torch.compile(step, backend=lambda *given: hidden(*given))(*batches(1)[0])


@pytest.mark.parametrize("optimizer, settings, words", [
    (torch.optim.SGD, {}, "SGD does not accumulate"),
    (torch.optim.Adam, {"weight_decay": 0.1}, "decoupled"),
    (memopt.optim.AdamW, {"state_bits": 8}, "state_bits"),
    (memopt.optim.CAME, {}, "accumulates by itself"),
    (memopt.optim.AdamW, {"skip_nonfinite": True}, "several micro-batches"),
    (memopt.optim.AdamA, {}, "accumulates by itself"),
])
@pytest.mark.table(4)
def test_optimizers_that_cannot_are_refused(optimizer, settings, words):
    _, _, step = training(optimizer, **settings)
    with pytest.raises(OptionError, match=words):
        accumulating(step)(*batches(1)[0])


@pytest.mark.parametrize("settings, words", [
    ({"end": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)}, "several micro-batches"),
    ({"zero_first": True}, "behind opt.step"),
    ({"set_to_none": False}, "from call to call.*\n.*\n.*without set_to_none=False"),
])
def test_gradients_needed_whole_are_refused(settings, words):
    _, _, step = training(**settings)
    with pytest.raises(OptionError, match=words) as caught:
        accumulating(step)(*batches(1)[0])
    assert "test_accumulate_in_states.py" in caught.value.where


def test_a_step_that_is_not_whole_is_refused():
    """With the line that cuts it, by whichever of its frames is compiled first."""
    model, _, step = training()
    model[0].weight.register_hook(lambda grad: 2 * grad)
    torch._dynamo.reset()
    with pytest.raises(OptionError, match="cannot take in gradients: .*a gradient hook"):
        torch.compile(step, backend="memopt", options={
            "accumulate": "optimizer_states", "lowering": "eager"})(*batches(1)[0])


def test_verify_is_refused():
    _, _, step = training()
    with pytest.raises(OptionError, match="verify"):
        accumulating(step, verify=True)(*batches(1)[0])


def test_a_function_without_an_update_is_refused():
    model = mlp(2)
    with pytest.raises(OptionError, match="no optimizer"):
        torch._dynamo.reset()
        torch.compile(lambda x: model(x).sum(), backend="memopt", options={
            "accumulate": "optimizer_states", "lowering": "eager"})(doubles(4, 32))
