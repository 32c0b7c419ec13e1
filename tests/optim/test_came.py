"""CAME is Algorithm 2 as the published package computes it, and its state is as small as it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import difference, give_gradients, parameters, train

from memopt_compile.errors import OptimizerError
from memopt_compile.optim import CAME, Adafactor, Adam
from memopt_compile.optim.factors import factored


class Published:
    """The package's arithmetic, came-pytorch 0.1.3, written down from its description."""

    def __init__(self, ps, lr, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16), clip=1.0, decay=0.0):
        self.ps, self.lr, self.betas, self.eps, self.clip, self.decay = ps, lr, betas, eps, clip, decay
        self.averages = {}

    def average(self, key, value, beta):
        self.averages[key] = beta * self.averages.get(key, 0) + (1 - beta) * value
        return self.averages[key]

    def matrix(self, key, value, beta):
        """1/√ of the rank-one approximation, over the last two dimensions."""
        row = self.average((key, "row"), value.mean(-1), beta)
        column = self.average((key, "column"), value.mean(-2), beta)
        share = row / row.mean(-1, keepdim=True)
        return (1 / share.sqrt())[..., :, None] * (1 / column.sqrt())[..., None, :]

    @torch.no_grad()
    def step(self):
        beta1, beta2, beta3 = self.betas
        for i, p in enumerate(self.ps):
            grad = p.grad.float() if p.dtype is torch.bfloat16 else p.grad
            square = grad * grad + self.eps[0]
            if p.dim() < 2:
                update = grad / self.average((i, "v"), square, beta2).sqrt()
            else:
                update = grad * self.matrix((i, "v"), square, beta2)
            update = update / max(1.0, update.square().mean().sqrt().item() / self.clip)
            mean = self.average((i, "m"), update, beta1)
            move = mean
            if p.dim() >= 2:
                move = mean * self.matrix((i, "s"), (update - mean) ** 2 + self.eps[1], beta3)
            p.sub_(self.lr * self.decay * p)
            p.sub_(self.lr * move)


def published_and_ours(steps, settings, dtype=torch.float32, scale=1.0):
    ps, qs = parameters(dtype=dtype), parameters(dtype=dtype)
    reference = Published(ps, lr=0.01, **settings)
    names = {"decay": "weight_decay", "clip": "clip_threshold"}
    ours = CAME(qs, lr=0.01, **{names.get(k, k): v for k, v in settings.items()})
    for i in range(steps):
        for some, opt in ((ps, reference), (qs, ours)):
            give_gradients(some, i, scale)
            opt.step()
        yield difference(ps, qs)


@pytest.mark.parametrize("settings", [
    {}, {"decay": 0.1}, {"clip": 0.5}, {"betas": (0.5, 0.9, 0.99)}, {"eps": (1e-8, 1e-3)}])
def test_equals_the_published_one_step_by_step(settings):
    assert max(published_and_ours(12, settings)) <= 5e-6
    assert max(published_and_ours(12, settings, torch.float64)) <= 1e-12


def test_sixteen_bits_compute_in_32():
    assert max(published_and_ours(6, {}, torch.bfloat16)) <= 2**-7
    _, opt = train(lambda p: CAME(p, lr=0.01), dtype=torch.bfloat16)
    assert {v.dtype for s in opt.state.values() for v in s.values()} == {torch.float32}


@given(scale=st.sampled_from([1e-12, 1e-6, 1e4, 1e12]), decay=st.floats(0, 0.5))
def test_gradients_of_any_size(scale, decay):
    assert max(published_and_ours(3, {"decay": decay}, torch.float64, scale)) <= 1e-9


def test_gradient_of_zeros_leaves_no_nan():
    ps = parameters([(4, 3), (5,)])
    opt = CAME(ps, lr=0.1)
    before = [p.clone() for p in ps]
    for p in ps:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert difference(ps, before) == 0


def elements(opt):
    return sum(v.numel() for s in opt.state.values() for k, v in s.items() if k != "step")


shapes = st.lists(st.integers(1, 12), min_size=0, max_size=5).map(tuple)


@given(shape=shapes)
def test_auto_is_never_above_adam(shape):
    def size(make):
        return elements(train(make, 1, shapes=[shape])[1])

    adam = size(Adam)
    assert size(lambda p: CAME(p, lr=0.1, factor_dims="auto")) <= adam == 2 * math.prod(shape)


@given(shape=shapes)
def test_auto_covers_every_dimension(shape):
    dims = factored(shape, "auto")
    assert dims is None or dims.rows + dims.columns == tuple(range(len(shape)))


@pytest.mark.parametrize(("shape", "published", "auto"), [
    ((64, 32), 2048 + 2 * 96, 2048 + 2 * 96),
    ((64, 32, 1, 1), 5 * 2048, 2048 + 2 * 96),  # each kernel of one element has two factors
    ((64, 32, 3, 3), 18432 + 2 * 2048 * 6, 18432 + 2 * (64 + 288)),
])
def test_state_of(shape, published, auto):
    for choice, expected in ((None, published), ("auto", auto)):
        _, opt = train(lambda p, c=choice: CAME(p, lr=0.1, factor_dims=c), 1, shapes=[shape])
        assert elements(opt) == expected


@pytest.mark.parametrize("make", [lambda p, **kw: CAME(p, lr=0.01, **kw), Adafactor])
def test_chosen_dimensions(make):
    """Channels factored and kernels a batch is the published way on the transposed tensor."""
    def run(choice, permute):
        ps = [torch.nn.Parameter(p.permute(permute).contiguous()) for p in
              parameters([(4, 6, 3, 2)])]
        opt = make(ps, factor_dims=choice)
        for i in range(5):
            generator = torch.Generator().manual_seed(i)
            g = torch.randn(4, 6, 3, 2, generator=generator, dtype=torch.float64)
            ps[0].grad = g.permute(permute)
            opt.step()
        return ps[0].detach()

    assert difference([run((0, 1), (0, 1, 2, 3)).permute(2, 3, 0, 1)],
                      [run(None, (2, 3, 0, 1))]) <= 1e-12


@pytest.mark.parametrize("make", [lambda p: CAME(p, lr=0.01, factor_dims="auto"),
                                  lambda p: Adafactor(p, factor_dims="auto")])
def test_auto_factors_a_convolution_as_the_matrix_of_its_filters(make):
    flat = train(make, shapes=[(16, 36)])[0]
    assert difference([p.flatten(1) for p in train(make, shapes=[(16, 4, 3, 3)])[0]], flat) <= 1e-12


@pytest.mark.parametrize("bad", [
    {"betas": (0.9, 0.999)}, {"betas": (0.9, 0.999, 1.0)}, {"eps": (-1.0, 0.0)},
    {"clip_threshold": 0.0}, {"factor_dims": "best"}, {"factor_dims": (0,)},
    {"factor_dims": (1, 1)}])
def test_refuses(bad):
    with pytest.raises(OptimizerError):
        CAME(parameters(), lr=0.1, **bad)


@pytest.mark.parametrize("dims", [(1, 2), (0, -2)])
def test_dimensions_that_a_parameter_lacks(dims):
    with pytest.raises(OptimizerError, match="cannot be factored"):
        CAME(parameters([(2, 3)]), lr=0.1, factor_dims=dims)
