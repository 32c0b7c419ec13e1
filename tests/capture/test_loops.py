"""Loops over micro-batches: three iterations are traced, and the numbers are those of all."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import memopt_compile as memopt
from memopt_compile import capture, loops  # noqa: F401  (capture makes the markers)

N = 7


def network():
    """With a mutable buffer, random numbers and, in the normalization, a mean over the chunk."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3),
                         nn.Linear(16, 4, bias=False), nn.BatchNorm1d(4)).double()


def outcome(body, compiler=lambda step: step, *, calls=3, rows=4 * N):
    """Results of some calls of a step with `body`, and the parameters after them."""
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        result = body(model, opt, x, y)
        opt.step()
        opt.zero_grad()
        return result

    torch._dynamo.reset()
    compiled = compiler(step)
    torch.manual_seed(1)
    results = []
    for _ in range(calls):
        x, y = torch.randn(rows, 8, dtype=torch.float64), torch.randint(4, (rows,))
        results.append(compiled(x, y))
    return results, model.state_dict()


def memopt_eager(**options):
    return lambda step: torch.compile(
        step, backend="memopt", options={"lowering": "eager", **options}, fullgraph=True)


def loss_of(model, xs, ys):
    loss = F.cross_entropy(model(xs), ys) / N
    loss.backward()
    return loss.detach()


def plain(model, opt, x, y):
    total = 0.0
    for xs, ys in memopt.micro_batches(N, x, y):
        total = total + loss_of(model, xs, ys)
    return total


def only_last(model, opt, x, y):
    for xs, ys in memopt.micro_batches(N, x, y):
        loss = loss_of(model, xs, ys)
    return loss


def clipped(model, opt, x, y):
    total = plain(model, opt, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return total


def carried(model, opt, x, y):
    previous = x.sum()
    for xs, ys in memopt.micro_batches(N, x, y):
        previous = loss_of(model, xs * (1 + 0.01 * previous), ys)
    return previous


def updating(model, opt, x, y):
    for xs, ys in memopt.micro_batches(N, x, y):
        loss = loss_of(model, xs, ys)
        opt.step()
        opt.zero_grad()
    return loss


def twice(model, opt, x, y):
    return plain(model, opt, x, y) + plain(model, opt, x, y)


def with_a_constant(model, opt, x, y):
    for xs, ys in memopt.micro_batches(N, x, y):
        loss = loss_of(model, xs * torch.tensor([1.0, 0.5] * 4, dtype=x.dtype), ys)
    return loss


@pytest.mark.parametrize("body", [plain, only_last, clipped, carried, updating, twice,
                                  with_a_constant])
@pytest.mark.table(4)
def test_traced_once(body, caplog):
    expected, parameters = outcome(body)
    got, mine = outcome(body, memopt_eager())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(mine, parameters, rtol=1e-9, atol=1e-12)
    assert traced(caplog) == (6 if body is twice else 3)


def traced(caplog):
    """How many backwards Dynamo traced in the graph that it handed over last."""
    said = re.findall(r"traced (\d+) backward", caplog.text)
    return int(said[-1])


@pytest.fixture(autouse=True)
def _all_is_said(caplog):
    caplog.set_level("INFO", logger="memopt_compile")


def counting(model, opt, x, y):
    total, count = 0.0, 0
    for xs, ys in memopt.micro_batches(N, x, y):
        total, count = total + loss_of(model, xs, ys), count + 1
    return total / count


def listing(model, opt, x, y):
    losses = []
    for xs, ys in memopt.micro_batches(N, x, y):
        losses.append(loss_of(model, xs, ys))
    return torch.stack(losses)


def numbering(model, opt, x, y):
    total = 0.0
    for i, (xs, ys) in enumerate(memopt.micro_batches(N, x, y)):
        total = total + loss_of(model, xs, ys) * (2 if i == N - 2 else 1)
    return total


def iterating(model, opt, x, y):
    total, weights = 0.0, iter([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0])
    for xs, ys in memopt.micro_batches(N, x, y):
        total = total + loss_of(model, xs, ys) * next(weights)
    return total


def remembering(model, opt, x, y):
    seen = {}
    for xs, ys in memopt.micro_batches(N, x, y):
        seen[len(seen)] = loss_of(model, xs, ys)
    return sum(seen.values())


def on_an_object(model, opt, x, y):
    model.batches = 0
    for xs, ys in memopt.micro_batches(N, x, y):
        total = loss_of(model, xs, ys)
        model.batches += 1
    return total * model.batches


def asking_which(model, opt, x, y):
    total, chunks = 0.0, memopt.micro_batches(N, x, y)
    for xs, ys in chunks:
        total = total + loss_of(model, xs, ys) * (2 if xs is chunks[-1][0] else 1)
    return total


def two_back(model, opt, x, y):
    before = previous = x.sum()
    for xs, ys in memopt.micro_batches(N, x, y):
        before, previous = previous, loss_of(model, xs * (1 + 0.01 * before), ys)
    return previous


def swapping(model, opt, x, y):
    a, b = x.sum(), x.mean()
    for xs, ys in memopt.micro_batches(N, x, y):
        loss = loss_of(model, xs * (1 + 0.01 * a), ys)
        a, b = b, a
    return loss


def one_backward(model, opt, x, y):
    total = 0.0
    for xs, ys in memopt.micro_batches(N, x, y):
        total = total + F.cross_entropy(model(xs), ys) / N
    total.backward()
    return total.detach()


def yielding(model, opt, x, y):
    losses = list(loss_of(model, *chunk) for chunk in memopt.micro_batches(N, x, y))
    return losses[-1] * len(losses)


def resuming(model, opt, x, y):
    def first_of(chunks):
        for xs, ys in chunks:
            return loss_of(model, xs, ys)

    return list(map(first_of, [iter(memopt.micro_batches(N, x, y))] * N))[-1]


def resuming_elsewhere(model, opt, x, y):
    total, chunks = 0.0, iter(memopt.micro_batches(N, x, y))
    for xs, ys in chunks:
        total = total + loss_of(model, xs, ys)
        break
    for xs, ys in chunks:
        total = total + 2 * loss_of(model, xs, ys)
    return total


@pytest.mark.parametrize("body", [
    counting, listing, numbering, iterating, remembering, on_an_object, asking_which, two_back,
    swapping, one_backward, yielding, resuming, resuming_elsewhere])
@pytest.mark.table(6)
def test_what_python_remembers_unrolls(body, caplog):
    expected, parameters = outcome(body)
    got, mine = outcome(body, memopt_eager())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(mine, parameters, rtol=1e-9, atol=1e-12)
    assert traced(caplog) == (1 if body is one_backward else N)


@pytest.mark.parametrize("rows", [2 * N + 1, N])
def test_chunks_of_different_sizes_unroll(rows, caplog):
    def body(model, opt, x, y):
        total = 0.0
        for xs, _ in memopt.micro_batches(N, x, y):
            loss = model[0](xs).square().mean() / N
            loss.backward()
            total = total + loss.detach()
        return total

    expected, parameters = outcome(body, rows=rows)
    got, mine = outcome(body, memopt_eager(), rows=rows)
    torch.testing.assert_close((got, mine), (expected, parameters), rtol=1e-9, atol=1e-12)
    assert traced(caplog) == (3 if rows == N else N)


def test_verify_traces_every_iteration(caplog):
    outcome(plain, memopt_eager(verify=True), calls=1)
    assert traced(caplog) == N


def test_a_break_in_the_loop_leaves_it_to_the_ordinary_path():
    def body(model, opt, x, y):
        total = 0.0
        for xs, ys in memopt.micro_batches(N, x, y):
            total = total + loss_of(model, xs, ys)
            if total.item() > 1e9:
                total = total * 0
        return total

    expected, parameters = outcome(body)
    got, mine = outcome(body, lambda step: torch.compile(
        step, backend="memopt", options={"lowering": "eager"}))
    torch.testing.assert_close((got, mine), (expected, parameters), rtol=1e-9, atol=1e-12)


def chunks(x):
    """Those of three iterations, cut beforehand as `micro_batches` does."""
    return [(i, torch.ops.aten.slice.Tensor(x, 0, i * 2, i * 2 + 2)) for i in (0, 1, 2)]


def test_golden():
    def step(x, w):
        total = w
        for index, chunk in chunks(x):
            chunk = torch.ops.memopt.micro_batch(chunk, 0, index, 6)
            total = total + torch.sin(chunk) * w
            torch.ops.memopt.loop_state([total], 0, index + 1)
        return total * 2

    module = make_fx(step, tracing_mode="fake")(torch.rand(12), torch.rand(2))
    assert loops.complete(module.graph) == 1
    module.graph.lint()
    module.recompile()
    x, w = torch.rand(12), torch.rand(2)
    torch.testing.assert_close(module(x, w), (w + (x.view(6, 2).sin() * w).sum(0)) * 2)
    assert [str(n.args[2:]) for n in module.graph.nodes if n.target is loops.SLICE] == [
        "(0, 2)", "(2, 4)", "(4, 6)", "(6, 8)", "(8, 10)", "(10, 12)"]


@pytest.mark.parametrize("change, why", [
    (lambda i, t: t + i, "has 1 where"),
    (lambda i, t: t.sin() if i == 1 else t.cos(), "is aten.sin"),
    (lambda i, t: t.sin() if i == 1 else t, "operators and the next"),
])
def test_iterations_that_differ_are_refused(change, why):
    def step(x):
        total = torch.zeros(2)
        for index, chunk in chunks(x):
            total = change(index, total + torch.ops.memopt.micro_batch(chunk, 0, index, 6))
            torch.ops.memopt.loop_state([total], 0, index + 1)
        return total

    module = make_fx(step, tracing_mode="fake")(torch.rand(12))
    with pytest.raises(loops.Unlike, match=why):
        loops.complete(module.graph)


@pytest.mark.parametrize(("bad", "message"), [
    ((2.0, torch.ones(4)), "something else is given than a number"), ((2, {"x": torch.ones(4)}), "something else is given than a number"),
    ((5, torch.ones(4)), "a batch of 4 cannot be cut into 5"), ((0, torch.ones(4)), "cannot be cut into 0"),
    ((2, torch.ones(4), torch.ones(6)), re.escape("first dimensions [4, 6]")), ((2,), "first dimensions")])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_cannot_be_cut_is_refused(bad, message, compiled):
    def step():
        for chunk, in memopt.micro_batches(*bad):
            chunk.sum()

    torch._dynamo.reset()
    with pytest.raises(memopt.MemoptError, match=message):
        (memopt.compile(step, lowering="eager") if compiled else step)()
