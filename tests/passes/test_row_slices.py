"""Losses of some rows of the logits, mostly those of the next token."""

import functools

import pytest
import torch
import torch.nn.functional as F
from graphs import captured
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_chunk_logits import VOCABULARY, chunk, loss_layer, refusal, widest
from torch import nn

import memopt_compile as memopt
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.row_slices import slice_first

SHAPE = (4, 6)


def of_next(logits, y):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), y[:, 1:].reshape(-1))


def capped(logits, y):
    return of_next(torch.tanh(logits / 5) * 5, y)


def by_copies(logits, y):
    """As older models of Hugging Face have it."""
    shifted, targets = logits.float()[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, VOCABULARY), targets.view(-1), label_smoothing=0.1)


def of_some_sequences(logits, y):
    return F.cross_entropy(logits[1:3].reshape(-1, VOCABULARY), y[1:3].reshape(-1))


def said(logits, y):
    return logits.log_softmax(-1)[:, :-1].gather(2, y[:, 1:, None].clamp(0))


def of_logarithms(logits, y):
    return -said(logits, y).mean()


def of_logarithms_with_entropies(logits, y):
    shares = logits.softmax(-1)[:, :-1]
    return -said(logits / 2, y).square().mean() - (shares * (shares + 1e-9).log()).sum(-1).mean()


def of_scores(logits, y):
    return (logits.logsumexp(-1)[:, :-1] - logits[:, :-1].gather(2, y[:, 1:, None].clamp(0))[..., 0]).mean()


def test_golden():
    step = slice_first(loss_layer(of_next, shape=(2, 3), bias=True))
    step.verify()
    assert step.text() == """\
p0: f64[50, 4]  # parameter trained
p1: f64[50]  # parameter trained
x0: f64[2, 3, 4]  # batch
x1: i64[2, 3]  # batch
forward:
  tanh_0: f64[2, 3, 4] = tanh(x0)
  view_0: f64[6, 4] = view(tanh_0, [6, 4])
  t_0: f64[4, 50] = t(p0)
  view_1: f64[2, 3, 4] = view(view_0, [2, 3, 4])
  slice_0: f64[2, 2, 4] = slice(view_1, 1, 0, 2)
  clone_0: f64[2, 2, 4] = clone(slice_0, memory_format=torch.contiguous_format)
  view_2: f64[4, 4] = view(clone_0, [4, 4])
  addmm_0: f64[4, 50] = addmm(p1, view_2, t_0)
  view_3: f64[2, 2, 50] = view(addmm_0, [2, 2, 50])
  view_4: f64[4, 50] = view(view_3, [4, 50])
  slice_1: i64[2, 2] = slice(x1, 1, 1, 9223372036854775807)
  clone_1: i64[2, 2] = clone(slice_1, memory_format=torch.contiguous_format)
  view_5: i64[4] = view(clone_1, [4])
  log_softmax_0: f64[4, 50] = _log_softmax(view_4, 1, False)
  nll_loss_forward_0: 2 values = nll_loss_forward(log_softmax_0, view_5, None, 1, -100)
  getitem_0: f64[] = getitem(nll_loss_forward_0, 0)
  getitem_1: f64[] = getitem(nll_loss_forward_0, 1)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  nll_loss_backward_0: f64[4, 50] = nll_loss_backward(full_0, log_softmax_0, view_5, None, 1, -100, getitem_1)
  log_softmax_backward_data_0: f64[4, 50] = _log_softmax_backward_data(nll_loss_backward_0, log_softmax_0, 1, torch.float64)
  view_6: f64[2, 2, 50] = view(log_softmax_backward_data_0, [2, 2, 50])
  mm_0: f64[4, 4] = mm(log_softmax_backward_data_0, p0)
  view_7: f64[2, 2, 4] = view(mm_0, [2, 2, 4])
  slice_backward_0: f64[2, 3, 4] = slice_backward(view_7, [2, 3, 4], 1, 0, 2, 1)
  view_8: f64[6, 4] = view(slice_backward_0, [6, 4])
  t_1: f64[50, 4] = t(log_softmax_backward_data_0)
  mm_1: f64[50, 4] = mm(t_1, view_2)
  sum_0: f64[50] = sum.dim_IntList(log_softmax_backward_data_0, [-2])
  view_9: f64[2, 3, 4] = view(view_8, [2, 3, 4])
  cos_0: f64[2, 3, 4] = cos(view_9)
return getitem_0, cos_0, mm_1, sum_0
"""


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("loss_of", [
    of_next, capped, by_copies, of_some_sequences, of_logarithms, of_logarithms_with_entropies, of_scores])
def test_parts_of_the_rows_that_are_read(loss_of, bias):
    relative = 1e-5 if loss_of is by_copies else 1e-12
    before, after = chunk(loss_layer(loss_of, shape=SHAPE, bias=bias), ignored=True, relative=relative)
    assert after < 0.8 * before


def of_targets(z, y):
    return z.gather(2, y[..., None]).mean()


FUNCTIONS = (torch.tanh, F.relu, lambda z: z.softmax(-1), lambda z: z.log_softmax(-1), lambda z: z - z.amax(-1, keepdim=True),
             lambda z: z / (1 + z.square().sum(-1, keepdim=True)), lambda z: z.masked_fill(z > 0.5, 0.0))
LOSSES = (of_targets, lambda z, y: z.square().mean(), lambda z, y: z.logsumexp(-1).mean(), lambda z, y: z.amax(-1).square().mean(),
          lambda z, y: F.cross_entropy(z.reshape(-1, VOCABULARY), y.reshape(-1)), lambda z, y: (z * z.softmax(-1)).sum(-1).mean())


@settings(max_examples=12, phases=[Phase.generate])  # to make a failure smaller takes minutes
@given(st.data())
def test_any_functions_in_front_of_a_slice_and_behind_it(data):
    """Losses of one slice of the rows, each of functions of its own of the logits, go in parts with the same numbers."""
    cut = data.draw(st.sampled_from([(slice(1, 3),), (slice(None), slice(0, -1)), (slice(None), slice(2, 4))]))
    some = st.lists(st.sampled_from(FUNCTIONS), max_size=2)
    terms = data.draw(st.lists(st.tuples(some, some, st.sampled_from(LOSSES)), min_size=1, max_size=3))

    def loss_of(logits, y):
        total = 0
        for before, behind, loss in terms:
            z = functools.reduce(lambda value, function: function(value), before, logits)[cut]
            total = total + loss(functools.reduce(lambda value, function: function(value), behind, z), y[cut])
        return total

    chunk(loss_layer(loss_of, shape=SHAPE))


@pytest.mark.parametrize("kept", [
    lambda logits, loss: (logits,),  # all rows are read
    lambda logits, loss: (logits[:, -1],),  # other rows
], ids=["all", "others"])
def test_rows_that_something_reads_are_made(kept):
    assert "needs all rows" in refusal(loss_layer(of_next, shape=SHAPE, more=kept))


@pytest.mark.parametrize("step", [
    loss_layer,
    lambda: loss_layer(lambda logits, y: (logits[:, :, :3].square().sum()), shape=SHAPE),
    lambda: loss_layer(lambda logits, y: logits[:, ::2].square().sum(), shape=SHAPE),
], ids=["all rows", "columns", "every other row"])
def test_nothing_to_do(step):
    step = step()
    text = step.text()
    assert slice_first(step).text() == text


@pytest.mark.parametrize("loss_of, bias", [(of_next, False), (of_next, True), (of_logarithms_with_entropies, True)])
def test_operators_as_inductor_has_them(loss_of, bias):
    """A gradient is padded by a scatter into zeros there, and a loss is made of smaller operators."""
    torch.manual_seed(0)
    table, head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY, bias)
    model = nn.ModuleList([table, head]).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = loss_of(head(torch.tanh(table(x))), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    tokens = torch.randint(VOCABULARY, (2, 4, 6))
    traced = captured(step, *tokens, lowering="inductor")
    Canonicalize().run(traced)
    assert not traced.graph.find_nodes(op="call_function", target=torch.ops.aten.slice_backward.default)
    before, after = chunk(traced)
    assert after < 0.8 * before and widest(traced) < 2 * 5 * VOCABULARY  # nor are there zeros as wide


@pytest.mark.parametrize("tokens_first", [False, True])
def test_logits_of_a_second_batch_size(tokens_first):
    """Which has a symbol for its rows, and that has no hash."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))

    def step(x, y):
        hidden = model[:3](x)
        if tokens_first:
            hidden = hidden.transpose(0, 1).contiguous().sin().transpose(0, 1)
        loss = F.cross_entropy(model[3](hidden).reshape(-1, VOCABULARY), y.view(-1))
        loss.backward()
        model.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, lowering="eager", memory_budget="1GiB")
    for batch in (4, 3, 2):
        x = torch.randint(VOCABULARY, (batch, 6))
        torch.testing.assert_close(compiled(x, x), step(x, x))
        assert memopt.report(compiled).predicted_peak_bytes <= 2**30


def test_a_second_batch_size_needs_parts_too():
    """The last, shorter batch of an epoch was refused the budget that the others keep: rows with symbols were none."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(400, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 400))

    def step(x):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        model.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, lowering="eager", memory_budget="150KiB")
    for batch in (10, 9):
        x = torch.randint(400, (batch, 6))
        torch.testing.assert_close(compiled(x), step(x))
        report = memopt.report(compiled)
        assert report.predicted_peak_bytes == report.measured_peak_bytes <= report.budget_bytes
        assert any(each.name == "chunk_logits" and each.op_changes for each in report.passes)
