"""AdamA is Algorithm 2: gradients are folded into the moments as they come, and gone."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import difference, fold_and_step, give_gradients, parameters, states, train

from memopt_compile.errors import OptimizerError
from memopt_compile.measure import measure
from memopt_compile.optim import CAME, AdamA, AdamW


def algorithm_2(ps, gradients, lr=0.02, betas=(0.9, 0.999), eps=1e-8, decay=0.0, scale=1.0,
                amsgrad=False, sign=1, n=1):
    """The paper's, over a list of mini-batches of lists of micro-batches; v estimates Adam's if
    `n` is their number."""
    theta = [p.detach().clone() for p in ps]
    m, v, top = ([torch.zeros_like(t) for t in theta] for _ in range(3))
    for t, batch in enumerate(gradients, 1):
        for i in range(len(theta)):
            m[i], v[i] = betas[0] * m[i], betas[1] * v[i]
        for micro in batch:
            for i, g in enumerate(micro):
                m[i] = m[i] + (1 - betas[0]) * sign * g
                v[i] = v[i] + scale * (1 - betas[1]) * g * g
        for i in range(len(theta)):
            v[i] = v[i] + (1 - betas[1]) * (1 - 1 / n) * (m[i] / (1 - betas[0] ** t)) ** 2
            top[i] = torch.maximum(top[i], v[i])
            root = ((top if amsgrad else v)[i] / (1 - betas[1] ** t)).sqrt() + eps
            theta[i] = theta[i] * (1 - lr * decay) - lr * m[i] / (1 - betas[0] ** t) / root
    return theta, m, v


def mini_batches(ps, n, count=4):
    generator = torch.Generator().manual_seed(7)
    return [[[torch.randn(p.shape, generator=generator, dtype=p.dtype) / n for p in ps]
             for _ in range(n)] for _ in range(count)]


@given(n=st.integers(1, 5), share=st.floats(0, 1), decay=st.floats(0, 1), amsgrad=st.booleans(),
       maximize=st.booleans(), last=st.booleans(), told=st.booleans(),
       betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)))
def test_is_algorithm_2(n, share, decay, amsgrad, maximize, last, told, betas):
    scale = 1 + share * (n - 1)
    ps = parameters([(3, 2), (4,), ()])
    gradients = mini_batches(ps, n)
    opt = AdamA(ps, lr=0.02, betas=betas, weight_decay=decay, amsgrad=amsgrad, v_scale=scale,
                maximize=maximize, micro_batches=n if told else 1)
    expected = algorithm_2(ps, gradients, betas=betas, decay=decay, scale=scale, amsgrad=amsgrad,
                           sign=-1 if maximize else 1, n=n if told else 1)
    for batch in gradients:
        fold_and_step(opt, ps, batch, last)
    assert difference(ps, expected[0]) <= 1e-9
    for name, values in zip(("exp_avg", "exp_avg_sq"), expected[1:]):
        assert difference([opt.state[p][name] for p in ps], values) <= 1e-12


@pytest.mark.parametrize("accumulate", [True, False])
def test_one_micro_batch_is_adam_bit_for_bit(accumulate):
    ours, theirs = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    a, b = AdamA(ours, weight_decay=0.1), torch.optim.AdamW(theirs, weight_decay=0.1, foreach=False)
    for i in range(5):
        give_gradients(ours, i)
        give_gradients(theirs, i)
        if accumulate:
            a.accumulate()
        a.step()
        b.step()
    assert difference(ours, theirs) == 0 == difference(states(a), states(b))


@pytest.mark.parametrize("n", [2, 5])
def test_told_of_its_micro_batches_it_is_adam_where_gradients_agree(n):
    ours, theirs = parameters(), parameters()
    a, b = AdamA(ours, micro_batches=n), AdamW(theirs, weight_decay=0)
    for _ in range(6):
        give_gradients(theirs, 3)
        b.step()
        for _ in range(n):
            give_gradients(ours, 3, scale=1 / n)
            a.accumulate()
        a.step()
    assert difference(ours, theirs) <= 1e-12 >= difference(states(a), states(b))


def test_equal_micro_batches_with_full_scale_are_adam():
    n = 4
    ours, theirs = parameters(), parameters()
    a, b = AdamA(ours, v_scale=n), AdamW(theirs, weight_decay=0)
    for i in range(5):
        give_gradients(theirs, i)
        for _ in range(n):
            give_gradients(ours, i, 1 / n)
            a.accumulate()
        a.step()
        b.step()
    assert difference(ours, theirs) <= 1e-12


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).double()


def run(model, opt, call, micro=3):
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for _ in range(micro):
            x = torch.randn(5, 64, generator=generator, dtype=torch.float64)
            (model(x).square().mean() / micro).backward()
            call()
        opt.step()
    return list(model.parameters())


def test_hooks_fold_the_same():
    first, second = network(), network()
    a, b = AdamA(first.parameters()), AdamA(second.parameters())
    handle = b.accumulate_in_backward()
    assert difference(run(first, a, a.accumulate), run(second, b, lambda: None)) <= 1e-12
    assert all(p.grad is None for p in second.parameters())
    handle.remove()
    second(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in second.parameters())


def test_hooks_keep_one_gradient():
    """Eight layers: the gradients of two at most are there at a time."""
    model = network()
    opt = AdamA(model.parameters())
    run(model, opt, opt.accumulate)
    x = torch.randn(1, 64, dtype=torch.float64)

    def backward():
        model(x).sum().backward()

    kept = measure(backward).transient_peak_bytes
    model.zero_grad()
    opt.accumulate_in_backward()
    layer = 64 * 64 * 8
    assert kept >= 8 * layer and measure(backward).transient_peak_bytes <= 3 * layer


def test_hooks_outlive_a_loaded_checkpoint():
    model = network()
    opt = AdamA(model.parameters(), lr=0.5)
    opt.accumulate_in_backward()
    run(model, opt, lambda: None)
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["betas"] = (0.0, 0.5)
    opt.load_state_dict(saved)
    x = torch.ones(1, 64, dtype=torch.float64)
    model(x).sum().backward()
    assert opt.state[model[7].weight]["exp_avg"].unique().numel() > 1  # β₁ 0: the gradient alone


def test_parameter_without_gradient_is_left_alone():
    ps = parameters([(3,), (3,)])
    before = ps[1].clone()
    opt = AdamA(ps, weight_decay=0.1)
    ps[0].grad = torch.ones_like(ps[0])
    opt.accumulate()
    opt.step()
    opt.step()  # nothing came: nothing moves, and no step is counted
    assert torch.equal(ps[1], before) and ps[1] not in opt.state
    assert opt.state[ps[0]]["step"] == 1


def test_gradient_in_some_micro_batches_only():
    ps = parameters([(3,), (2,)])
    gradients = mini_batches(ps, 2, 1)
    opt = AdamA(ps, lr=0.02)
    (first, second), = gradients
    second[1].zero_()
    expected, _, _ = algorithm_2(ps, gradients)
    for p, g in zip(ps, first):
        p.grad = g
    opt.accumulate()
    ps[0].grad = second[0]
    opt.step()
    assert difference(ps, expected) <= 1e-12


@pytest.mark.parametrize("kind", [AdamA, CAME])
def test_gradient_of_the_last_micro_batch_alone_is_not_folded_again(kind):
    """A head that only the last micro-batch uses, which `step` folds, in two mini-batches."""
    runs = []
    for last in (True, False):
        ps = parameters([(3, 2), (2, 3)])
        opt = kind(ps, lr=0.02, **{"micro_batches": 2} if kind is CAME else {})
        for _ in range(2):
            for some in (ps[:1], ps):
                sum((p**2).sum() for p in some).backward()
                if last or some is not ps:
                    opt.accumulate()
            opt.step()
        runs.append(ps)
        assert all(p.grad is None for p in ps)
    assert difference(*runs) == 0


def test_nothing_is_to_be_zeroed():
    ps = parameters()
    opt = AdamA(ps)
    give_gradients(ps, 0)
    opt.step()
    assert all(p.grad is None for p in ps)


def test_resumes_within_a_mini_batch():
    def half(opt, ps, i):
        give_gradients(ps, i)
        opt.accumulate()

    ps = parameters()
    opt = AdamA(ps)
    half(opt, ps, 0)
    saved, copies = copy.deepcopy(opt.state_dict()), copy.deepcopy(ps)
    again = AdamA(copies)
    again.load_state_dict(saved)
    for o, some in ((opt, ps), (again, copies)):
        half(o, some, 1)
        o.step()
    assert difference(ps, copies) == 0
    assert set(opt.state[ps[0]]) == {"step", "exp_avg", "exp_avg_sq"}  # AdamW's, once it stepped


def test_checkpoint_of_adamw():
    ps, old = train(lambda p: torch.optim.AdamW(p, weight_decay=0.1, foreach=False))
    copies = copy.deepcopy(ps)
    new = AdamA(copies)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for some, opt in ((ps, old), (copies, new)):
        give_gradients(some, 1)
        opt.step()
    assert difference(ps, copies) == 0


def test_skips_a_micro_batch_that_is_not_finite():
    ps = parameters([(3,)])
    gradients = mini_batches(ps, 2, 2)
    opt = AdamA(ps, lr=0.02, skip_nonfinite=True)
    expected, _, _ = algorithm_2(ps, gradients)
    for batch in gradients:
        for micro in ([torch.full_like(ps[0], float("nan"))], *batch):
            ps[0].grad = micro[0].clone()
            opt.accumulate()
        opt.step()
    assert difference(ps, expected) <= 1e-12


@pytest.mark.parametrize(("bad", "message"), [
    ({"v_scale": 0.5}, "v_scale is 0.5"), ({"v_scale": 5, "micro_batches": 4}, "v_scale is 5, and there are 4"),
    ({"micro_batches": 0}, "micro_batches is 0"),
    ({"micro_batches": 2.5}, "micro_batches is 2.5"), ({"betas": (0.9, 1.0)}, "betas are"),
    ({"fused": True}, "fused=True")])
def test_refuses(bad, message):
    with pytest.raises(OptimizerError, match=message):
        AdamA(parameters(), **bad)


def test_refuses_decay_that_is_added_to_gradients():
    _, adam = train(lambda p: torch.optim.Adam(p, weight_decay=0.1))
    with pytest.raises(OptimizerError, match="weight decay is added to gradients"):
        AdamA(parameters()).load_state_dict(adam.state_dict())


def scaled_mini_batch(opt, p, scaler, each, last):
    """Three micro-batches; the scaler unscales `each`, or in its own step what is left of the `last`."""
    for i in range(3):
        scaler.scale((p * torch.arange(1.0, 5)).sum() * (i + 1) / 3).backward()
        if each:
            scaler.unscale_(opt)
        if each or last or i < 2:
            opt.accumulate()
        if each:
            scaler.update()
    if each:
        opt.step()
    else:
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("kind", [AdamA, CAME])
@pytest.mark.parametrize("last", [True, False])
def test_gradient_scaler_is_refused_behind_accumulate(kind, last):
    """It can only unscale the gradients that are left, and silently did."""
    p = nn.Parameter(torch.ones(4))
    opt = kind([p], lr=0.1)
    with pytest.raises(OptimizerError, match="GradScaler") as caught:
        scaled_mini_batch(opt, p, torch.amp.GradScaler("cpu", init_scale=1024.0), False, last)
    assert kind.__name__ in caught.value.where and torch.equal(p, torch.ones(4))
    assert not hasattr(opt, "grad_scale")
    opt.step()  # by itself, as before


@pytest.mark.parametrize("kind", [AdamA, CAME])
def test_gradient_scaler_of_each_micro_batch_or_of_one(kind):
    """As the refusal says; one that is switched off; and a mini-batch that was not cut."""
    results = []
    for settings, each in (({"enabled": False}, False), ({"init_scale": 1024.0}, True), ({"enabled": False}, True)):
        p = nn.Parameter(torch.ones(4))
        opt = kind([p], lr=0.1, skip_nonfinite=True)
        scaled_mini_batch(opt, p, torch.amp.GradScaler("cpu", **settings), each, True)
        results.append((p, opt.state[p]["exp_avg"]))
    for settings in ({"enabled": False}, {"init_scale": 1024.0}):
        p = nn.Parameter(torch.ones(4))
        opt, scaler = kind([p], lr=0.1), torch.amp.GradScaler("cpu", **settings)
        scaler.scale((p * torch.arange(1.0, 5)).sum()).backward()
        scaler.step(opt)
        results.append((p, opt.state[p]["exp_avg"]))
    for one, other in ((results[0], results[1]), (results[0], results[2]), (results[3], results[4])):
        assert difference(one, other) <= 1e-6
