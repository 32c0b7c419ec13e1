"""Losses that go through their logits a sample at a time."""

import pytest
import torch
import torch.nn.functional as F
from graphs import outcome, values_for
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_chunk_logits import VOCABULARY, chunk, loss_layer, refusal, widest
from torch import nn

import memopt_compile as memopt
from memopt_compile.backends import eager
from memopt_compile.passes.chunk_logits import plain_losses
from memopt_compile.row_loops import loops_joined

SAMPLES, TOKENS = 4, 6


def of_targets(logits, y):
    return logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]


def entropy(logits):
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def both(logits, y):
    """Rows of a matrix beside those of a loop, as TRL's selective_log_softmax has them."""
    return (logits.gather(-1, y[..., None])[..., 0] - torch.stack([z.logsumexp(-1) for z in logits])).square().mean()


def weighted(logits, y):
    """A loss of each sample, added up with weights of their own."""
    weights, total = y.sum(1).double(), 0
    for i in range(len(logits)):
        total = total + weights[i] * F.cross_entropy(logits[i], y[i])
    return total


def soft(y):
    """A constant that is the same for each sample, and what belongs to it."""
    return torch.full((len(y), VOCABULARY), 0.01, dtype=torch.float64).scatter(-1, y[:, None], 0.9)


def rows(value):
    return value.reshape(-1, *value.shape[2:])


def tokens(logits, y):
    """As torchtune has them, a part of each sample's tokens at a time."""
    total = 0
    for a, b in zip(logits.chunk(4, 1), y.chunk(4, 1)):
        total = total + F.cross_entropy(rows(a), rows(b), reduction="sum")
    return total / (y != -100).sum()


def entropies(logits, y):
    """As TRL has them, for some rows at a time, beside a loss of all rows."""
    logits, y = rows(logits[:, :-1]), rows(y[:, 1:])
    with torch.no_grad():
        found = torch.cat([entropy(z) for z in logits.split(7)])
    return (F.cross_entropy(logits, y, reduction="none") * (found > found.mean())).mean() - 0.1 * torch.cat(
        [entropy(z) for z in logits.split(6)]).mean()


LOSSES = {
    "beside what is whole": both,
    "stacked": lambda z, y: torch.stack([of_targets(a, b) for a, b in zip(z, y)]).exp().mean(),
    "one behind the other": lambda z, y: torch.cat([of_targets(a, b) for a, b in zip(z.split(2), y.split(2))]).var(),
    "weighted": weighted,
    "each target": lambda z, y: torch.stack([F.cross_entropy(a, b, reduction="none") for a, b in zip(z, y)]).mean(),
    "soft targets": lambda z, y: torch.stack([(soft(b) * a.log_softmax(-1)).sum(-1) for a, b in zip(z, y)]).exp().mean(),
    "with entropies": lambda z, y: torch.stack([of_targets(a, b) - entropy(a) for a, b in zip(z, y)]).var(),
    "halves": lambda z, y: (of_targets(z[:2], y[:2]) - of_targets(z[2:], y[2:])).sigmoid().mean(),
    "tokens": tokens,
    "uneven": lambda z, y: sum(F.cross_entropy(a, b, reduction="sum") for a, b in zip(rows(z).split(5), rows(y).split(5))),
    "uneven means": lambda z, y: sum(F.cross_entropy(a, b) for a, b in zip(rows(z).split([3, 11, 10]), rows(y).split([3, 11, 10]))),
    "shifted slices": lambda z, y: sum(
        F.cross_entropy(rows(a), rows(b), label_smoothing=0.1) for a, b in zip(z[:, :-1].split(2), y[:, 1:].split(2))),
    "one token left": lambda z, y: sum(
        F.cross_entropy(rows(a), rows(b), reduction="sum") for a, b in zip(z[:, :-1].split(2, 1), y[:, 1:].split(2, 1))),
    "entropies beside it": entropies,
    "a teacher's": lambda z, y: sum(F.kl_div(a.log_softmax(-1), torch.sin(a.detach()).softmax(-1), reduction="sum")
                                    for a in rows(z).split(5)) / y.numel(),
    "smoothed by hand": lambda z, y: sum(((soft(b) - a) ** 2).sum() / (1 + b.sum()) for a, b in zip(rows(z).split(9), rows(y).split(9))),
    "capped and shifted": lambda z, y: torch.stack(
        [of_targets(3 * torch.tanh(a / 3), b) for a, b in zip(z[:, :-1], y[:, 1:])]).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_in_parts(name):
    step = loss_layer(LOSSES[name], shape=(SAMPLES, TOKENS))
    before, after = chunk(step)
    assert after < 0.8 * before
    assert widest(step) < SAMPLES * TOKENS * VOCABULARY


def test_casts_of_each_sample(capfd):
    """As Inductor has them: PyTorch has no rule for a batch of these, and says so."""
    step = loss_layer(lambda z, y: torch.stack([F.cross_entropy(a.float(), b) for a, b in zip(z, y)]).mean(), shape=(SAMPLES, TOKENS))
    for cast in step.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        cast.target, cast.args, cast.kwargs = torch.ops.prims.convert_element_type.default, (*cast.args, cast.kwargs["dtype"]), {}
    before, after = chunk(step)
    assert after < 0.8 * before and "batching rule" not in capfd.readouterr().err


def in_turn(logits, y):
    """Each sample is scaled by what came of the one before."""
    total, scale = 0, y.sum().double().sigmoid()
    for a, b in zip(logits, y):
        loss = F.cross_entropy(a * scale, b)
        total, scale = total + loss, torch.sigmoid(loss.detach())
    return total


def once_and_twice(logits, y):
    found = 0
    for i, (a, b) in enumerate(zip(logits, y)):
        one, other = b[:, None] + 0.5, b[:, None] * 0.3
        found = found + torch.addcmul(a.sin(), one, other if i else one).logsumexp(-1).sum()
    return found


ODD = {
    "in turn": in_turn,
    "one operand twice": once_and_twice,
    "filled with others": lambda z, y: sum((a - torch.full((TOKENS, VOCABULARY), i + 0.5, dtype=a.dtype)).square().mean()
                                           for i, a in enumerate(z)),
    "in another order": lambda z, y: sum((a * b[:, None] + (a + a.sum() * b[:, None]) if b.shape[0] % 2 else (
        a + a.sum() * b[:, None]) + a * b[:, None]).logsumexp(-1).sum() for a, b in zip(rows(z).split(5), rows(y).split(5))),
    "of other types": lambda z, y: sum((a.float() * s).logsumexp(-1).sum() for a, s in zip(z, y.sum(1).double().sqrt())),
    "other numbers": lambda z, y: sum((a / len(a)).logsumexp(-1).mean() for a in rows(z).split(7)),
}


@pytest.mark.parametrize("name", ODD)
def test_numbers_stay(name):
    """Whether it can be joined or not."""
    step = loss_layer(ODD[name], shape=(SAMPLES, TOKENS))
    values = values_for(step)
    expected = outcome(eager.lower(step), values)
    joined = loops_joined(plain_losses(step))
    joined.verify()
    for a, b in zip(expected, outcome(eager.lower(joined), values), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6 if name == "of other types" else 1e-12, atol=1e-12)


@settings(max_examples=15, phases=[Phase.generate])  # to make a failure smaller takes minutes
@given(st.data())
def test_any_loop(data):
    """Losses of each piece by random row-wise functions are the same once they are joined."""
    samples = data.draw(st.integers(2, 5))
    functions = [torch.tanh, lambda z: torch.exp(-z.abs()), lambda z: z - z.amax(-1, keepdim=True), lambda z: z.softmax(-1),
                 lambda z: z / (1 + z.square().sum(-1, keepdim=True)), lambda z: torch.where(z > 0, z, 0.1 * z), F.gelu,
                 lambda z: z - z.detach().softmax(-1)]
    chosen = data.draw(st.lists(st.sampled_from(functions), min_size=1, max_size=3))
    end = data.draw(st.sampled_from(["sum", "scaled", "mean", "stack", "cat"]))
    split = data.draw(st.sampled_from([
        lambda value: list(value), lambda value: value.split(2), lambda value: value.chunk(3, 1), lambda value: value.unbind(1),
        lambda value: rows(value).split(5), lambda value: rows(value).split([2, 3, 3 * samples - 5])]))

    def loss_of(logits, y):
        found = []
        for i, (z, target) in enumerate(zip(split(logits), split(y))):
            for function in chosen:
                z = function(z)
            found.append((1 + i * (end == "scaled")) * of_targets(z, target))
            if end == "mean":
                found[-1] = found[-1].mean() + z.square().mean()
        if end in ("sum", "scaled", "mean") or len({each.shape for each in found}) > 1:
            return sum(each.square().mean() for each in found)
        return getattr(torch, end)(found).square().mean()

    step = loss_layer(loss_of, shape=(samples, 3))
    chunk(step)
    assert widest(step) < samples * 3 * VOCABULARY


def test_golden():
    step = loss_layer(lambda z, y: torch.stack([a.logsumexp(-1) for a in z]).sum(), shape=(2, 3))
    step = loops_joined(step)
    step.verify()
    assert step.text() == """\
p0: f64[50, 4]  # parameter trained
p1: f64[50]  # parameter trained
x0: f64[2, 3, 4]  # batch
x1: i64[2, 3]  # batch
forward:
  tanh_0: f64[2, 3, 4] = tanh(x0)
  t_0: f64[4, 50] = t(p0)
  view_0: f64[6, 4] = view(tanh_0, [6, 4])
  mm_0: f64[6, 50] = mm(view_0, t_0)
  view_1: f64[2, 3, 50] = view(mm_0, [2, 3, 50])
  view_2: f64[6, 50] = view(view_1, [6, 50])
  logsumexp_0: f64[6] = logsumexp(view_2, [-1])
  view_3: f64[2, 3] = view(logsumexp_0, [2, 3])
  sum_0: f64[] = sum(view_3)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[2, 3] = expand(full_0, [2, 3])
  unsqueeze_0: f64[6, 1] = unsqueeze(logsumexp_0, -1)
  sub_0: f64[6, 50] = sub(view_2, unsqueeze_0)
  exp_0: f64[6, 50] = exp(sub_0)
  clone_0: f64[2, 3] = clone(expand_0, memory_format=torch.contiguous_format)
  view_4: f64[6] = view(clone_0, [6])
  unsqueeze_1: f64[6, 1] = unsqueeze(view_4, -1)
  mul_0: f64[6, 50] = mul(unsqueeze_1, exp_0)
  view_5: f64[2, 3, 50] = view(mul_0, [2, 3, 50])
  view_6: f64[6, 50] = view(view_5, [6, 50])
  t_1: f64[50, 6] = t(view_6)
  mm_1: f64[50, 4] = mm(t_1, view_0)
  mm_2: f64[6, 4] = mm(view_6, p0)
  view_7: f64[2, 3, 4] = view(mm_2, [2, 3, 4])
  cos_0: f64[2, 3, 4] = cos(view_7)
return sum_0, cos_0, mm_1
"""


@pytest.mark.parametrize("loss_of", [
    lambda z, y: of_targets(z, y).mean(),
    lambda z, y: of_targets(z[0], y[0]).mean(),
    lambda z, y: (of_targets(z[0], y[0]) * z[1].logsumexp(-1)).mean(),
])
def test_nothing_to_do(loss_of):
    """No loop, a part of one, and samples that go other ways."""
    step = loss_layer(loss_of, shape=(2, 3))
    text = step.text()
    assert loops_joined(step).text() == text


@pytest.mark.parametrize("loss_of", [
    lambda z, y: (z[0].log_softmax(-1) * z[1].log_softmax(-1)).mean(),
    lambda z, y: sum(a.softmax(-1).cumsum(0)[-1].max() for a in z),
])
def test_refused_where_rows_meet(loss_of):
    """Of two samples, or of one."""
    assert "slice" in refusal(loss_layer(loss_of, shape=(2, 3)))


def smoothed(logits, y):
    """Its gradients depend on all samples."""
    return torch.stack([F.cross_entropy(a, b, label_smoothing=0.1) for a, b in zip(logits, y)]).square().mean()


def of_some_targets(logits, y):
    """Each sample has a constant of its own, of equal value, and a mask that backward computes again."""
    return sum(F.cross_entropy(a, torch.where(b % 3 == 0, -100, b)) for a, b in zip(logits, y))


@pytest.mark.parametrize("loss_of, lowering", [(smoothed, "eager"), (of_some_targets, "eager"), pytest.param(
    both, "inductor", marks=[pytest.mark.inductor, pytest.mark.thorough])])
def test_trained(loss_of, lowering):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 400)).double()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        return model, step

    x, y = torch.rand(4, 24, 16, dtype=torch.float64), torch.arange(96).view(4, 24)
    (exact, plain), (model, step) = made(), made()
    step = memopt.compile(step, memory_budget=0.5, lowering=lowering)
    for _ in range(2):
        torch.testing.assert_close(step(x, y), plain(x, y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([*model.parameters()], [*exact.parameters()], rtol=1e-12, atol=1e-12)
    report = memopt.report(step)
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= report.budget_bytes
