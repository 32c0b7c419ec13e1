"""Losses of all log-probabilities, a teacher's logits, and what else of a wide matrix comes in two goes."""

import pytest
import torch
import torch.nn.functional as F
from graphs import by_hand, gradient, seed
from test_chunk_logits import VOCABULARY, WIDTH, chunk, doubles, loss_layer, refusal, widest
from torch import nn

import memopt_compile as memopt
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.row_regions import Region, regions
from memopt_compile.row_twice import computed_twice

ROWS = 24


def of_targets(logits, y):
    return logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]


def preference(logits, y):
    """DPO (Rafailov et al., 2023, eq. 7): the first half of the sequences is preferred to the second."""
    of_sequences = of_targets(logits[:, :-1], y[:, 1:]).sum(-1)
    half = len(of_sequences) // 2
    return -F.logsigmoid(0.1 * (of_sequences[:half] - of_sequences[half:])).mean()


def normalized_advantages(logits, y):
    """A policy loss whose weights come of all rows."""
    found = of_targets(logits, y)
    weights = ((found - found.mean()) / (found.std() + 1e-3)).detach()
    return -(found * weights).mean()


def twice_over(logits, y):
    """Weights of all rows, and logits again of all weighted rows: three goes."""
    weights = of_targets(logits, y).softmax(0)
    return (logits * weights[:, None]).logsumexp(-1).var()


LOSSES = {
    "squared": (lambda z, y: F.cross_entropy(z, y) ** 2, (ROWS,)),
    "perplexity": (lambda z, y: F.cross_entropy(z, y).exp(), (ROWS,)),
    "preference": (preference, (4, 7)),
    "advantages": (normalized_advantages, (ROWS,)),
    "three goes": (twice_over, (ROWS,)),
    "an auxiliary loss of the rows": (lambda z, y: F.cross_entropy(z, y) + z.logsumexp(-1).var(), (ROWS,)),
}
AT_ONCE = {
    "of each class": lambda z, y: F.binary_cross_entropy_with_logits(
        z, F.one_hot(y.clamp(min=0), VOCABULARY).double(), pos_weight=torch.arange(50.0).double(), reduction="none").mean(),
    "of each class, summed": lambda z, y: F.binary_cross_entropy_with_logits(z, z.detach().sigmoid() / 2, reduction="sum"),
    "mean": lambda z, y: (z.tanh() * 3).mean(),
    "first of a dimension": lambda z, y: z.view(ROWS, 25, 2)[:, :, 0].logsumexp(-1).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_in_several_goes(name):
    loss_of, shape = LOSSES[name]
    step = loss_layer(loss_of, shape=shape)
    assert not [r for r in regions(step).values() if isinstance(r, Region)]
    before, after = chunk(step, ignored=True)
    assert after < 0.75 * before
    assert widest(step) < ROWS * VOCABULARY


@pytest.mark.parametrize("name", AT_ONCE)
def test_at_once(name):
    step = loss_layer(AT_ONCE[name], shape=(ROWS,))
    products = len(step.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
    before, after = chunk(step, (2,))
    assert after < before and widest(step) < ROWS * VOCABULARY
    assert len(step.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) <= 2 * products


def test_mean_of_short_numbers_does_not_overflow():
    """A sum of 16-bit numbers would."""
    step = loss_layer(lambda z, y: (z.half() * 0 + 1000).mean().double(), shape=(ROWS,))
    chunk(step)


@pytest.mark.parametrize("first", ["teacher", "student"])
def test_a_teacher(first):
    """Whose logits come first, or when a part of the loss is there already: it waits for them."""
    def layer(w, v, x, y):
        h, w = torch.tanh(x).detach().requires_grad_(), w.detach().requires_grad_()
        wanted = (F.linear(x.cos(), v) / 2).softmax(-1) if first == "teacher" else None
        logits = F.linear(h, w)
        loss = 3 * F.cross_entropy(logits, y)
        wanted = (F.linear(x.cos(), v) / 2).softmax(-1) if wanted is None else wanted
        loss = loss + F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        grads = torch.autograd.grad(loss, (h, w), seed(loss.detach()))
        return loss.detach(), torch.cos(grads[0]), gradient(grads[1])

    step = by_hand(layer, ("p", doubles(VOCABULARY, WIDTH)), ("p", doubles(VOCABULARY, WIDTH)),
                   ("x", doubles(ROWS, WIDTH)), ("x", torch.ones(ROWS, dtype=torch.int64)))
    Canonicalize().run(step)
    before, after = chunk(step, ignored=True)
    assert after < 0.5 * before
    assert widest(step) < ROWS * VOCABULARY


@pytest.mark.parametrize("square", [False, True])
def test_a_weight_that_is_updated_between_two_losses_is_not_read_anew(square):
    def layer(w, x, y):
        leaf = w.detach().requires_grad_()
        logits = F.linear(x.tanh(), leaf)
        loss = F.cross_entropy(logits, y)
        w.sub_(gradient(torch.autograd.grad(loss, leaf, seed(loss.detach()), retain_graph=True)[0]))
        loss = of_targets(logits, y).sum()
        loss = loss ** 2 if square else loss
        w.sub_(gradient(torch.autograd.grad(loss, leaf, seed(loss.detach()))[0]))
        return loss.detach()

    step = by_hand(layer, ("p", doubles(VOCABULARY, WIDTH)), ("x", doubles(ROWS, WIDTH)),
                   ("x", torch.ones(ROWS, dtype=torch.int64)))
    Canonicalize().run(step)
    if square:
        assert "needs a result of the loss" in refusal(step)
    else:
        chunk(step)
        assert widest(step) < ROWS * VOCABULARY


def test_golden():
    step = computed_twice(loss_layer(lambda z, y: z.logsumexp(-1).sum() ** 2, shape=(5,)))
    step.verify()
    assert step.text() == """\
p0: f64[50, 4]  # parameter trained
p1: f64[50]  # parameter trained
x0: f64[5, 4]  # batch
x1: i64[5]  # batch
forward:
  tanh_0: f64[5, 4] = tanh(x0)
  t_0: f64[4, 50] = t(p0)
  mm_0: f64[5, 50] = mm(tanh_0, t_0)
  logsumexp_0: f64[5] = logsumexp(mm_0, [-1])
  sum_0: f64[] = sum(logsumexp_0)
  pow_0: f64[] = pow.Tensor_Scalar(sum_0, 2)
backward:
  pow_1: f64[] = pow.Tensor_Scalar(sum_0, 1.0)
  mul_0: f64[] = mul.Scalar(pow_1, 2.0)
  expand_0: f64[5] = expand(mul_0, [5])
  unsqueeze_0: f64[5, 1] = unsqueeze(expand_0, -1)
  unsqueeze_1: f64[5, 1] = unsqueeze(logsumexp_0, -1)
  mm_1: f64[5, 50] = mm(tanh_0, t_0)
  sub_0: f64[5, 50] = sub(mm_1, unsqueeze_1)
  exp_0: f64[5, 50] = exp(sub_0)
  mul_1: f64[5, 50] = mul(unsqueeze_0, exp_0)
  t_1: f64[50, 5] = t(mul_1)
  mm_2: f64[50, 4] = mm(t_1, tanh_0)
  mm_3: f64[5, 4] = mm(mul_1, p0)
  cos_0: f64[5, 4] = cos(mm_3)
return pow_0, cos_0, mm_2
"""


@pytest.mark.parametrize("loss_of", [F.cross_entropy, lambda z, y: F.cross_entropy(z, y) ** 2])
def test_nothing_to_do_or_undone(loss_of):
    """Rows that go by themselves stay, and so do those that do not even in two goes."""
    step = loss_layer(loss_of, more=lambda logits, loss: (logits,))
    text = step.text()
    assert computed_twice(step).text() == text
    assert "needs" in refusal(step)


@pytest.mark.inductor
@pytest.mark.thorough
def test_on_inductor():
    """Its loops must not look at readers that Inductor has left out, such as the mean that comes with a variance."""
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 400)).double()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            opt.zero_grad()
            loss = twice_over(model(x), torch.zeros(len(x), dtype=torch.int64))
            loss.backward()
            opt.step()
            return loss.detach()

        return model, step

    x = torch.rand(96, 16, dtype=torch.float64)
    (exact, plain), (model, step) = made(), made()
    step = memopt.compile(step, memory_budget=0.5)
    for _ in range(2):
        torch.testing.assert_close(step(x), plain(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([*model.parameters()], [*exact.parameters()], rtol=1e-12, atol=1e-12)
    del exact, plain
    report = memopt.report(step)
    assert memopt.measure(step, x).peak_bytes == report.predicted_peak_bytes <= report.budget_bytes
