"""Losses that go through their logits a sample at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_chunk_logits import VOCABULARY, chunk, loss_layer, refusal, widest
from torch import nn

import memopt_compile as memopt
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


LOSSES = {
    "beside what is whole": both,
    "stacked": lambda z, y: torch.stack([of_targets(a, b) for a, b in zip(z, y)]).exp().mean(),
    "one behind the other": lambda z, y: torch.cat([of_targets(a, b) for a, b in zip(z.split(2), y.split(2))]).var(),
    "weighted": weighted,
    "each target": lambda z, y: torch.stack([F.cross_entropy(a, b, reduction="none") for a, b in zip(z, y)]).mean(),
    "soft targets": lambda z, y: torch.stack([(soft(b) * a.log_softmax(-1)).sum(-1) for a, b in zip(z, y)]).exp().mean(),
    "with entropies": lambda z, y: torch.stack([of_targets(a, b) - entropy(a) for a, b in zip(z, y)]).var(),
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


@settings(max_examples=10, phases=[Phase.generate])  # to make a failure smaller takes minutes
@given(st.data())
def test_any_loop(data):
    """Losses of each sample by random row-wise functions are the same once they are joined."""
    samples = data.draw(st.integers(2, 5))
    functions = [torch.tanh, torch.exp, lambda z: z - z.amax(-1, keepdim=True), lambda z: z.softmax(-1),
                 lambda z: z / (1 + z.square().sum(-1, keepdim=True)), lambda z: torch.where(z > 0, z, 0.1 * z), F.gelu]
    chosen = data.draw(st.lists(st.sampled_from(functions), min_size=1, max_size=3))
    end = data.draw(st.sampled_from(["sum", "stack", "cat"]))

    def loss_of(logits, y):
        found = []
        for z, target in zip(logits, y):
            for function in chosen:
                z = function(z)
            found.append(of_targets(z, target))
        if end == "sum":
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
  logsumexp_0: f64[2, 3] = logsumexp(view_1, [2])
  sum_0: f64[] = sum(logsumexp_0)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[2, 3] = expand(full_0, [2, 3])
  unsqueeze_0: f64[2, 3, 1] = unsqueeze(expand_0, 2)
  unsqueeze_1: f64[2, 3, 1] = unsqueeze(logsumexp_0, 2)
  sub_0: f64[2, 3, 50] = sub(view_1, unsqueeze_1)
  exp_0: f64[2, 3, 50] = exp(sub_0)
  mul_0: f64[2, 3, 50] = mul(unsqueeze_0, exp_0)
  view_2: f64[6, 50] = view(mul_0, [6, 50])
  t_1: f64[50, 6] = t(view_2)
  mm_1: f64[50, 4] = mm(t_1, view_0)
  mm_2: f64[6, 4] = mm(view_2, p0)
  view_3: f64[2, 3, 4] = view(mm_2, [2, 3, 4])
  cos_0: f64[2, 3, 4] = cos(view_3)
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
    lambda z, y: (of_targets(z[:1], y[:1]) - of_targets(z[1:], y[1:])).sigmoid().mean(),
])
def test_refused_where_samples_meet(loss_of):
    """In their rows, or in that the gradient of one is the other's negative."""
    assert "select" in refusal(loss_layer(loss_of, shape=(2, 3)))


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
