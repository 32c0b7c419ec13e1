"""Rule 7 of `chunk_logits`: what forward reads and backward would make again is one where both are in parts."""

from unittest import mock

import torch
import torch.nn.functional as F
from graphs import by_hand, gradient, outcome, seed, values_for

from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.passes import chunk_logits
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.chunk_logits import ChunkLogits

aten = torch.ops.aten
VOCABULARY, WIDTH, ROWS = 50, 4, 12


def layer_that_makes_again():
    """The loss layer, whose hidden states and weight backward computes a second time."""
    def layer(w, x, y):
        logits = (x.tanh() @ w.sin().t()).detach().requires_grad_()
        loss = F.cross_entropy(logits, y)
        (rows,) = torch.autograd.grad(loss, [logits], seed(loss.detach()))
        return loss.detach(), torch.cos(rows @ w.sin()), gradient(rows.t() @ x.tanh())

    step = by_hand(layer, ("p", torch.rand(VOCABULARY, WIDTH, dtype=torch.float64)),
                   ("x", torch.rand(ROWS, WIDTH, dtype=torch.float64)), ("x", torch.ones(ROWS, dtype=torch.int64)))
    Canonicalize().run(step)
    return step


def count(step, target):
    return len(step.graph.find_nodes(op="call_function", target=target))


def chunk(step):
    """Rewrite `step`, whose numbers stay; whether its peak falls."""
    values = values_for(step)
    expected, before = outcome(eager.lower(step), values), timeline(step).transient_peak_bytes
    ChunkLogits(0, (4,)).run(step)
    step.verify()
    for a, b in zip(expected, outcome(eager.lower(step), values), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    return timeline(step).transient_peak_bytes < before


def test_hidden_states_and_weight_are_made_once():
    step = layer_that_makes_again()
    assert count(step, aten.tanh.default) == count(step, aten.sin.default) == 2
    assert chunk(step) and count(step, aten.tanh.default) == count(step, aten.sin.default) == 1


def test_parts_are_weighed_once_for_all_limits_and_anew_where_the_step_is_another():
    step = layer_that_makes_again()
    peak = timeline(step).peak_bytes
    with (mock.patch.dict(chunk_logits._known, clear=True),
          mock.patch.object(chunk_logits, "_weight", wraps=chunk_logits._weight) as weighed):
        for limit in (0, peak // 2, peak - 1):
            ChunkLogits(limit, (2, 4)).run(step.copy())
        assert weighed.call_count == 2
        step.replace(*step.graph.find_nodes(op="call_function", target=aten.tanh.default)[::-1])
        ChunkLogits(0, (2, 4)).run(step)
        assert weighed.call_count == 4
