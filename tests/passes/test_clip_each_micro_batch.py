"""Gradients clipped micro-batch by micro-batch, and accumulated in Adam's states."""

import pytest
import torch
import torch.nn.functional as F
from graphs import by_hand, gradient, seed
from test_accumulate_in_states import N, accumulating, algorithm_2, batches, layers, training
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import memopt_compile as memopt
from memopt_compile.errors import OptionError
from memopt_compile.passes.accumulate_in_states import AccumulateInStates
from memopt_compile.passes.canonicalize import Canonicalize

LIMIT = 0.01


def each(gradients):
    """Algorithm 2's gradients with the norm of each limited."""
    return [g * (LIMIT / g.norm()).clamp(max=1) for g in gradients]


def together(gradients):
    norm = torch.stack([g.norm() for g in gradients]).norm()
    return [g * (LIMIT / (norm + 1e-6)).clamp(max=1) for g in gradients]


def each_as_torch(gradients):
    return [g * (LIMIT / (g.norm() + 1e-6)).clamp(max=1) for g in gradients]


def values(gradients):
    return [g.clamp(-LIMIT / 20, LIMIT / 20) for g in gradients]


def apart(clip, optimizer=torch.optim.AdamW):
    """A step that has `clip` see the gradients of one backward, and adds them up itself."""
    model = layers()
    opt = optimizer(model.parameters(), lr=0.01)

    def step(x, y):
        total = 0.0
        for xs, ys in memopt.micro_batches(N, x, y):
            sums = [p.grad for p in model.parameters()]
            opt.zero_grad()
            loss = F.cross_entropy(model(xs), ys) / N
            loss.backward()
            clip(model)
            for p, so_far in zip(model.parameters(), sums):
                if so_far is not None:
                    p.grad = p.grad + so_far
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return model, step


def folding_itself(clip=None, **settings):
    """The same with AdamA."""
    model = layers()
    opt = memopt.optim.AdamA(model.parameters(), lr=0.01, weight_decay=0.01, **settings)

    def step(x, y):
        total = 0.0
        for xs, ys in memopt.micro_batches(N, x, y):
            loss = F.cross_entropy(model(xs), ys) / N
            loss.backward()
            if clip:
                clip(model)
            opt.accumulate()
            total = total + loss.detach()
        opt.step()
        return total

    return model, step


def one_by_one(model):
    for p in model.parameters():
        clip_grad_norm_([p], LIMIT)


def equal(made, expected, run):
    (model, step), (reference, published) = made, expected
    step = run(step)
    for batch in batches(4):
        torch.manual_seed(2)  # dropout draws as in the reference
        got = step(*batch)
        torch.manual_seed(2)
        torch.testing.assert_close(got, published(*batch), rtol=1e-9, atol=0)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings, same", [
    ({"optimizer": memopt.optim.AdamW}, {}),
    ({"optimizer": memopt.optim.Adam}, {"decay": 0.0}),
    ({"optimizer": memopt.optim.AdamW, "maximize": True}, {"sign": -1}),
])
@pytest.mark.table(4)
def test_max_norm_is_of_each_micro_batch(settings, same):
    model, _, step = training(max_norm=LIMIT, **settings)
    equal((model, step), algorithm_2(clip=each, **same), accumulating)


@pytest.mark.parametrize("clip, same", [
    (one_by_one, each_as_torch),
    (lambda model: clip_grad_norm_(model.parameters(), LIMIT), together),
    (lambda model: clip_grad_value_(model.parameters(), LIMIT / 20), values),
    # Sums within one backward are one gradient: its square is not the sum of squares.
    (lambda model: [p.grad.add_(p.grad) for p in model.parameters()], lambda gs: [g + g for g in gs]),
    (lambda model: [p.grad.add_(p.grad.mean()) for p in model.parameters()],
     lambda gs: [g + g.mean() for g in gs]),
])
@pytest.mark.table(6)
def test_gradients_of_one_backward_may_be_changed(clip, same):
    equal(apart(clip), algorithm_2(clip=same), accumulating)
    equal(folding_itself(clip), algorithm_2(clip=same), plain)
    equal(folding_itself(clip), algorithm_2(clip=same), captured)


@pytest.mark.parametrize("way", ["plain", "captured"])
def test_max_norm_of_adama(way):
    equal(folding_itself(max_norm=LIMIT), algorithm_2(clip=each), globals()[way])


def plain(step):
    return step


def captured(step):
    torch._dynamo.reset()
    return torch.compile(step, backend="memopt", fullgraph=True, options={"lowering": "eager"})


def test_norms_of_16_bits_are_taken_in_32():
    def two_batches(p, m, x):
        of_0 = gradient(x * seed(torch.sum(x * p)))
        of_1 = gradient(p * seed(torch.sum(x + p)))
        limit = torch.full((), 0.5, dtype=torch.float64)
        clipped = torch.ops.memopt.clip(of_0 + of_1, limit)
        m.copy_(torch.ops.memopt.fold(m, clipped, torch.full((), 0.9, dtype=torch.float64), 1))

    halves = [(role, torch.rand(4, dtype=torch.float16)) for role in "psx"]
    step = by_hand(two_batches, *halves)
    Canonicalize().run(step)
    AccumulateInStates().run(step)
    step.verify()
    text = step.text()
    assert text.count("f32[4] = _to_copy(") == text.count("f32[] = sqrt(") == 2
    assert text.count("f16[4] = mul(") >= 4 and "fold" not in text and "= clip(" not in text


@pytest.mark.parametrize("clip, name", [
    (one_by_one, "mul"),
    (lambda model: clip_grad_norm_(model.parameters(), LIMIT), "mul"),
    (lambda model: clip_grad_value_(model.parameters(), LIMIT), "clamp"),
    (lambda model: [p.grad.add_(p.detach(), alpha=0.1) for p in model.parameters()], "add"),
])
@pytest.mark.table(4)
def test_sums_so_far_are_refused(clip, name):
    """Without taking the sums away first, the second micro-batch's clip sees two gradients."""
    model = layers()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        for xs, ys in memopt.micro_batches(N, x, y):
            (F.cross_entropy(model(xs), ys) / N).backward()
            clip(model)
        opt.step()
        opt.zero_grad()

    with pytest.raises(OptionError, match=f"used together, by \\w*{name}.*\n.*\n.*max_norm") as caught:
        accumulating(step)(*batches(1)[0])
    assert "test_clip_each_micro_batch.py" in caught.value.where


def test_a_sum_of_sums_is_refused():
    """Each gradient of a backward would enter twice."""
    model = layers()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def twice(x, y):
        for xs, ys in memopt.micro_batches(N, x, y):
            (F.cross_entropy(model(xs), ys) / N).backward()
        for p in model.parameters():
            p.grad = p.grad + p.grad
        opt.step()
        opt.zero_grad()

    with pytest.raises(OptionError, match="used together, by add"):
        accumulating(twice)(*batches(1)[0])
