from functools import partial

import pytest
import torch
from graphs import by_hand, check, gradient, mlp, seed, training_step, two_layers
from torch import nn

from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.rematerialize_free import RematerializeFree
from memopt_compile.step_graph import Phase
from tests.passes import kept_for_backward

WIDE = 64 * 32 * 8  # bytes of one layer's activation


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def test_golden():
    step = two_layers()
    check(step, RematerializeFree())
    assert (
        step.text()
        == """\
p0: f64[4, 4]  # parameter trained
p1: f64[4, 4]  # parameter trained
x0: f64[8, 4]  # batch
forward:
  mm_0: f64[8, 4] = mm(x0, p0)
  tanh_0: f64[8, 4] = tanh(mm_0)
  mm_1: f64[8, 4] = mm(tanh_0, p1)
  sum_0: f64[] = sum(mm_1)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[8, 4] = expand(full_0, [8, 4])
  tanh_1: f64[8, 4] = tanh(mm_0)
  t_0: f64[4, 8] = t(tanh_1)
  mm_2: f64[4, 4] = mm(t_0, expand_0)
  t_1: f64[4, 8] = t(x0)
  t_2: f64[4, 4] = t(p1)
  mm_3: f64[8, 4] = mm(expand_0, t_2)
  cos_0: f64[8, 4] = cos(mm_0)
  mul_0: f64[8, 4] = mul(mm_3, cos_0)
  mm_4: f64[4, 4] = mm(t_1, mul_0)
return sum_0, mm_2, mm_4
"""
    )


def activations_kept(step):
    return sum(
        n.meta["val"].nbytes
        for n in step.computing()
        if step.phase(n) is Phase.FORWARD
        and n.target is not torch.ops.aten.t.default
        and any(step.phase(u) is Phase.BACKWARD for u in n.users if u.op != "output")
        and n.meta["val"].nbytes >= WIDE
    )


def gelus(layers=4):
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(32, 4)).double()


def test_what_a_pointwise_operator_made_is_not_kept():
    step = training_step(gelus(), batch=64)
    Canonicalize().run(step)
    assert activations_kept(step) == 8 * WIDE  # each linear's result and each GELU's
    before, after = check(step, RematerializeFree())
    assert activations_kept(step) == 4 * WIDE
    assert after < before


def test_taken_although_the_captured_step_peaks_elsewhere():
    """With few rows the captured order peaks among the gradients, wherever activations die."""
    step = training_step(gelus(layers=6), batch=4)
    Canonicalize().run(step)
    before, after = check(step, RematerializeFree())
    assert before == after and step.op_counts()["gelu"] == 12


def test_random_operators_are_not_drawn_again():
    def step(p, x):
        hidden = torch.mm(x, p)
        dropped = hidden * torch.ops.aten.bernoulli.p(hidden, 0.5)
        active = dropped.sin()
        loss = torch.mm(active, active.t()).sum()
        upstream = torch.ops.aten.expand(seed(loss), (8, 8))
        return loss, torch.mm(upstream, active) * dropped.cos()

    graph = by_hand(step, ("p", doubles(4, 4)), ("x", doubles(8, 4)))
    check(graph, RematerializeFree())
    assert graph.op_counts()["bernoulli.p"] == 1


@pytest.mark.parametrize("look_up", [lambda x, i: torch.gather(x, 1, i.expand(8, -1)),
                                     lambda x, i: torch.ops.aten._unsafe_index(x, [None, i])])
def test_what_is_looked_up_is_looked_up_again(look_up):
    """As the border of a padded image, which is larger than the image."""
    def step(p, x, i):
        wide = look_up(torch.mm(x, p), i)
        squares = torch.mm(wide, wide.t())
        loss = squares.tanh().sum()
        upstream = torch.mm(torch.ops.aten.expand(seed(loss), (8, 8)), wide)
        of_hidden = torch.zeros_like(x).scatter_add(1, i.expand(8, -1), upstream)
        return loss, gradient(torch.mm(x.t(), of_hidden))

    graph = by_hand(step, ("p", doubles(4, 4)), ("x", doubles(8, 4)), ("x", torch.arange(32) % 4))
    assert kept_for_backward.kept_bytes(graph) == 8 * 32 * 8
    check(graph, RematerializeFree())
    assert kept_for_backward.kept_bytes(graph) == 8 * 4 * 8


@pytest.mark.parametrize("rows, kept_bytes", [(4, 8 * 16 * 8), (8, 8 * 16 * 8 + 8 * 2 * 8)])
def test_a_small_reduction_is_taken_again(rows, kept_bytes):
    """Of what is kept anyway, as the mean over the heads of an attention; of more than four it is kept itself."""
    def step(p, x):
        wide = torch.mm(x, p)
        groups = torch.ops.aten.view(wide, (8, rows, 16 // rows))
        means = torch.mean(groups, [1])
        loss = (wide * wide).sum() + means.sin().sum()
        of_means = torch.ops.aten.expand((means.cos() * seed(loss)).unsqueeze(1), (8, rows, 16 // rows))
        return loss, gradient(torch.mm(x.t(), 2 * wide + of_means.reshape(8, 16) / rows))

    graph = by_hand(step, ("p", doubles(4, 16)), ("x", doubles(8, 4)))
    assert kept_for_backward.kept_bytes(graph) == 8 * 16 * 8 + 8 * 16 // rows * 8
    check(graph, RematerializeFree(), slack=64)
    assert kept_for_backward.kept_bytes(graph) == kept_bytes


def test_nothing_to_compute_again():
    step = training_step(mlp(2, 8), width=8)
    Canonicalize().run(step)
    text = step.text()
    check(step, RematerializeFree())
    assert step.text() == text  # a ReLU's backward reads its result, which is as large


def test_refuses_a_graph_without_backward():
    step = by_hand(lambda x: x.sin().cos(), ("x", doubles(4)))
    assert "no backward" in RematerializeFree().requires(step)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_loop_keeps_its_numbers(micro_batches):
    step = training_step(gelus(), batch=64, micro_batches=micro_batches, clip=1.0)
    check(step, Canonicalize(), RematerializeFree(), slack=64)


class Attention(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        rows = self.norm(x).view(-1, 8, x.shape[-1])
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2)
                   for t in self.qkv(rows).chunk(3, dim=2))
        weights = torch.softmax(q @ k.transpose(2, 3) / 4, -1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2)).view_as(x)


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(128, 4))


NETWORKS = {
    "gelus": lambda: gelus(),
    "attention": lambda: nn.Sequential(Attention(), nn.SiLU(), Attention(), nn.Linear(32, 4)),
    "convolutions": convolutions,
    "norms": lambda: nn.Sequential(
        *(m for _ in range(3) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Tanh())),
        nn.Linear(32, 4)),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.table(4)
def test_keeps_no_more_than_the_min_cut_partitioner(network):
    step = training_step(NETWORKS[network]().double(), batch=64, lowering="inductor")
    Canonicalize().run(step)
    check(step, RematerializeFree(), slack=64)
    model = NETWORKS[network]().double()
    x, y = torch.randn(64, 32, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    theirs = kept_for_backward.the_partitioners(lambda: nn.functional.cross_entropy(model(x), y))
    assert kept_for_backward.kept_bytes(step) <= theirs


@pytest.mark.slow
@pytest.mark.parametrize("make", [kept_for_backward.gpt, kept_for_backward.resnet,
                                  partial(kept_for_backward.hugging_face, "bert")], ids=["GPT", "ResNet", "BERT"])
@pytest.mark.table(4)
def test_keeps_much_less_of_real_models(make):
    loss, model = make()
    assert 0 < kept_for_backward.ours(loss, model) < 0.75 * kept_for_backward.the_partitioners(loss)
