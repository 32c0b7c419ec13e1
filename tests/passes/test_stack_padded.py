from unittest import mock

import pytest
import torch
from graphs import by_hand, outcome, values_for
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memopt_compile as memopt
from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.passes.stack_padded import StackPadded

aten = torch.ops.aten


def summed(places, dim=0, others=0, count=3, at=1):
    """The sum of gradients of the members at these places of a matrix, padded, and of other matrices."""
    shape = [count, 4] if dim == 0 else [4, count]

    def step(x):
        terms = [aten.select_backward.default(torch.exp(x.select(dim, i) * (n + 1)), shape, dim, i) for n, i in enumerate(places)]
        terms[at:at] = [torch.cos(x * n) for n in range(others)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    return by_hand(step, ("x", torch.rand(shape, dtype=torch.float64)))


def test_golden():
    step = summed([2, 0, 1])
    StackPadded().run(step)
    step.verify()
    assert (
        step.text()
        == """\
x0: f64[3, 4]  # batch
forward:
  select_0: f64[4] = select.int(x0, 0, 2)
  mul_0: f64[4] = mul(select_0, 1)
  exp_0: f64[4] = exp(mul_0)
  select_1: f64[4] = select.int(x0, 0, 0)
  mul_1: f64[4] = mul(select_1, 2)
  exp_1: f64[4] = exp(mul_1)
  select_2: f64[4] = select.int(x0, 0, 1)
  mul_2: f64[4] = mul(select_2, 3)
  exp_2: f64[4] = exp(mul_2)
  unsqueeze_0: f64[1, 4] = unsqueeze(exp_1, 0)
  unsqueeze_1: f64[1, 4] = unsqueeze(exp_2, 0)
  unsqueeze_2: f64[1, 4] = unsqueeze(exp_0, 0)
  cat_0: f64[3, 4] = cat([unsqueeze_0, unsqueeze_1, unsqueeze_2], 0)
return cat_0
"""
    )


def test_taken_back_where_the_peak_does_not_fall():
    step = by_hand(lambda x: (aten.select_backward.default(x[0].exp(), [2, 4], 0, 0) + aten.select_backward.default(x[1], [2, 4], 0, 1),
                              x.expand(1000, 2, 4).clone().sum()), ("x", torch.rand(2, 4)))
    assert StackPadded().requires(step) is None
    text = step.text()
    StackPadded().run(step)
    assert step.text() == text


@pytest.mark.parametrize("places", [[0, 1], [0, 0, 2], [1]])
def test_refuses_sums_that_lack_a_member(places):
    assert "not added up" in StackPadded().requires(summed(places))


def test_refuses_what_others_read():
    def step(x):
        padded = [aten.select_backward.default(x[i].exp(), [2, 4], 0, i) for i in range(2)]
        return padded[0] + padded[1], padded[0].cos()

    assert StackPadded().requires(by_hand(step, ("x", torch.rand(2, 4)))) is not None


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(2, 5), st.integers(0, 1), st.integers(0, 2))
def test_the_same_numbers(data, count, dim, others):
    """In every bit, wherever other terms stand: a sum that cannot be in the same order stays."""
    more = data.draw(st.lists(st.integers(0, count - 1), max_size=3))
    step = summed(data.draw(st.permutations([*range(count), *more])), dim, others, count, data.draw(st.integers(0, 3)))
    values, before = values_for(step), timeline(step).transient_peak_bytes
    assert StackPadded().requires(step) is None or others
    expected = outcome(eager.lower(step), values)
    StackPadded().run(step)
    step.verify()
    assert timeline(step).transient_peak_bytes <= before
    for got, wanted in zip(outcome(eager.lower(step), values), expected, strict=True):
        assert torch.equal(got, wanted)


class OverTime(nn.Module):
    """A cell that reads an embedding step by step."""

    def __init__(self):
        super().__init__()
        self.words, self.cell = nn.Embedding(20, 64), nn.GRUCell(64, 16)

    def forward(self, x):
        state, words = torch.zeros(len(x), 16), self.words(x)
        for t in range(x.shape[1]):
            state = self.cell(words[:, t], state)
        return state


class OfSamples(nn.Module):
    """A loss of each sample for itself, which reads it twice."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 200)

    def forward(self, x):
        return torch.stack([one.logsumexp(-1).mean() + one.square().mean() for one in map(self.head(self.words(x)).__getitem__, range(len(x)))])


def trained(model, **options):
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        net, x = model(), torch.randint(20, (8, 12))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        run = memopt.compile(step, **options) if options else step
        for _ in range(3):
            run(x)
        return list(net.parameters()), options and memopt.report(run)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("model, lowering", [
    (OverTime, "eager"), (OfSamples, "eager"), pytest.param(OfSamples, "inductor", marks=pytest.mark.inductor)])
def test_loops_need_less(model, lowering):
    expected, _ = trained(model)
    got, report = trained(model, lowering=lowering)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert report.predicted_peak_bytes == report.measured_peak_bytes
    torch._dynamo.reset()
    with mock.patch.object(StackPadded, "requires", lambda self, step: "left out"):
        _, without = trained(model, lowering=lowering)
    assert report.measured_peak_bytes - report.resident_bytes <= 0.97 * (without.measured_peak_bytes - without.resident_bytes)


def test_a_sum_is_a_term_and_a_member_of_others():
    """As in layers with a skip that each go through a sequence step by step: what is there later reads the stack."""
    def step(x):
        def padded(value, i):
            return aten.select_backward.default(value, [2, 4], 0, i)

        first = padded(x[0].exp(), 0) + padded(x[1].exp(), 1)
        second = first + padded(first[0].cos(), 0) + padded(first[1].cos(), 1)
        third = aten.select_backward.default(first, [2, 2, 4], 0, 0) + aten.select_backward.default(second, [2, 2, 4], 0, 1)
        return second, third

    graph = by_hand(step, ("x", torch.rand(2, 4, dtype=torch.float64)))
    values = values_for(graph)
    expected = outcome(eager.lower(graph), values)
    StackPadded().run(graph)
    graph.verify()
    assert "select_backward" not in graph.text()
    for got, wanted in zip(outcome(eager.lower(graph), values), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_sequence_may_be_long():
    def step(x):
        total = aten.select_backward.default(x[0].exp(), [1500, 2], 0, 0)
        for i in range(1, 1500):
            total = total + aten.select_backward.default(x[i], [1500, 2], 0, i)
        return total

    assert StackPadded().requires(by_hand(step, ("x", torch.rand(1500, 2)))) is None
