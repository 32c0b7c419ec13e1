"""CAME with the gradients of a mini-batch in parts: N-ths of a step, and no gradient kept."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import mlp
from test_capture import in_one_graph, in_parts
from torch import nn
from training import difference, fold_and_step, give_gradients, parameters, states

from memopt_compile.errors import OptimizerError
from memopt_compile.measure import measure
from memopt_compile.optim import CAME


def written_out(ps, gradients, n, lr=0.02, betas=(0.9, 0.999, 0.9999), d=1.0, decay=0.0):
    """The equations of the docstring over a list of mini-batches of lists of parts."""
    b1, b2, b3 = (beta ** (1 / n) for beta in betas)
    k = betas[0] ** 2 / b1**2
    theta = [p.detach().clone() for p in ps]
    m = [torch.zeros_like(t) for t in theta]
    second, residual = [{} for _ in theta], [{} for _ in theta]

    def average(kept, x, beta):
        """The average of x by row and column means, or by itself below two dimensions."""
        if x.dim() < 2:
            kept["v"] = beta * kept.get("v", 0) + (1 - beta) * x
            return kept["v"]
        for name, dim in (("r", -1), ("c", -2)):
            kept[name] = beta * kept.get(name, 0) + (1 - beta) * x.mean(dim, keepdim=True)
        return kept["r"] * kept["c"] / kept["r"].mean(-2, keepdim=True)

    for batch in gradients:
        for i, t in enumerate(theta):
            s = torch.ones_like(t)
            for part in batch:
                g = part[i]
                u = n * g / average(second[i], n * g**2 + 1e-30, b2).sqrt()
                u = u / max(1.0, float(u.square().mean().sqrt()) / (n**0.5 * d))
                m[i] = b1 * m[i] + (1 - b1) * u
                if t.dim() >= 2:
                    s = average(residual[i], k / n * (u - m[i]) ** 2 + 1e-16, b3)
            theta[i] = (1 - lr * decay) * t - lr * m[i] / s.sqrt()
    return theta


@given(n=st.integers(1, 5), last=st.booleans(), d=st.sampled_from([0.3, 1.0]), decay=st.floats(0, 0.5),
       betas=st.tuples(st.floats(0.1, 0.99), st.floats(0.5, 0.999), st.floats(0.5, 0.9999)))
def test_is_what_its_equations_say(n, last, d, decay, betas):
    ps = parameters()
    generator = torch.Generator().manual_seed(7)
    gradients = [[[torch.randn(p.shape, generator=generator, dtype=p.dtype) / n for p in ps]
                  for _ in range(n)] for _ in range(3)]
    expected = written_out(ps, gradients, n, betas=betas, d=d, decay=decay)
    opt = CAME(ps, lr=0.02, betas=betas, clip_threshold=d, weight_decay=decay, micro_batches=n)
    for batch in gradients:
        fold_and_step(opt, ps, batch, last)
    assert difference(ps, expected) <= 1e-9


@pytest.mark.parametrize("bits", [32, 8])
def test_one_part_is_a_step_bit_for_bit(bits):
    shapes = [(80, 60), (7,), (4, 3, 3, 3)]
    ours, whole = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    a, b = CAME(ours, lr=0.02, state_bits=bits), CAME(whole, lr=0.02, state_bits=bits)
    for i in range(4):
        for some, opt in ((ours, a), (whole, b)):
            give_gradients(some, i)
            if opt is a:
                opt.accumulate()
            opt.step()
    assert difference(ours, whole) == 0 == difference(states(a), states(b))
    assert all(p.grad is not None for p in whole)  # as torch's: what nobody accumulated stays


@pytest.mark.parametrize("n", [4, 16])
def test_parts_move_as_far_as_the_whole_where_gradients_are_noise(n):
    """Root mean square of what 30 steps change, against CAME on the sum of the same gradients."""
    moved = []
    for parts in (1, n):
        ps = parameters([(64, 48)])
        start = ps[0].detach().clone()
        opt, generator = CAME(ps, lr=1e-3, micro_batches=parts), torch.Generator().manual_seed(1)
        for _ in range(30):
            draws = torch.randn((n, *ps[0].shape), generator=generator, dtype=ps[0].dtype) / n
            for g in (draws if parts == n else [draws.sum(0)]):
                ps[0].grad = g.clone()
                opt.accumulate()
            opt.step()
        moved.append(float((ps[0] - start).norm()))
    assert moved[1] == pytest.approx(moved[0], rel=0.1)


def test_hooks_keep_one_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).double()
    opt = CAME(model.parameters(), lr=1e-3, micro_batches=2)
    handle = opt.accumulate_in_backward()
    x = torch.randn(1, 64, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
    opt.step()
    layer = 64 * 64 * 8
    assert measure(lambda: model(x).sum().backward()).transient_peak_bytes <= 5 * layer
    handle.remove()


def test_resumes_within_a_mini_batch():
    ps = parameters()
    opt = CAME(ps, lr=0.02, micro_batches=2)
    give_gradients(ps, 0)
    opt.accumulate()
    copies = copy.deepcopy(ps)
    again = CAME(copies, lr=0.02, micro_batches=2)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for some, o in ((ps, opt), (copies, again)):
        give_gradients(some, 1)
        o.step()
    assert difference(ps, copies) == 0


def test_captured_whole():
    def build():
        model = mlp()
        return in_parts(model, CAME(model.parameters(), lr=0.02, micro_batches=3))

    in_one_graph(build)


def test_refuses():
    with pytest.raises(OptimizerError, match="micro_batches is 0"):
        CAME(parameters(), lr=0.1, micro_batches=0)
