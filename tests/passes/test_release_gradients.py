import pytest
import torch
from graphs import by_hand, check, gradient, mlp, seed, training_step

from memopt_compile.liveness import timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.step_graph import Phase

LAYERS, WIDTH = 6, 32
LAYER = WIDTH * WIDTH * 8  # bytes of one layer's gradient


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def canonical(**settings):
    step = training_step(mlp(LAYERS, WIDTH), **settings)
    Canonicalize().run(step)
    return step


def activations(step):
    """Transient peak of forward alone."""
    return max(p.live_bytes for p in timeline(step).points if p.phase is Phase.FORWARD)


def test_golden():
    def two_layers(p, q, x):
        hidden = torch.mm(x, p)
        loss = torch.mm(hidden, q).sum()
        upstream = torch.ops.aten.expand(seed(loss), (2, 4))
        of_q = gradient(torch.mm(hidden.t(), upstream))
        of_p = gradient(torch.mm(x.t(), torch.mm(upstream, q.t())))
        new_p, new_q = p - of_p, q - of_q
        p.copy_(new_p)
        q.copy_(new_q)
        return loss

    step = by_hand(two_layers, ("p", doubles(4, 4)), ("p", doubles(4, 4)), ("x", doubles(2, 4)))
    assert check(step, ReleaseGradients()) == (392, 328)
    assert (
        step.text()
        == """\
p0: f64[4, 4]  # parameter trained
p1: f64[4, 4]  # parameter trained
x0: f64[2, 4]  # batch
forward:
  mm_0: f64[2, 4] = mm(x0, p0)
  mm_1: f64[2, 4] = mm(mm_0, p1)
  sum_0: f64[] = sum(mm_1)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[2, 4] = expand(full_0, [2, 4])
  t_0: f64[4, 2] = t(mm_0)
  mm_2: f64[4, 4] = mm(t_0, expand_0)
  t_1: f64[4, 2] = t(x0)
  t_2: f64[4, 4] = t(p1)
  mm_3: f64[2, 4] = mm(expand_0, t_2)
update:
  sub_0: f64[4, 4] = sub(p1, mm_2)
  copy_0: f64[4, 4] = copy_(p1, sub_0)
backward:
  mm_4: f64[4, 4] = mm(t_1, mm_3)
update:
  sub_1: f64[4, 4] = sub(p0, mm_4)
  copy_1: f64[4, 4] = copy_(p0, sub_1)
return sum_0
"""
    )


def test_about_one_layer_of_gradients_is_alive():
    step = canonical()
    before, after = check(step, ReleaseGradients())
    # AdamW in functional form holds the gradient and five results of its size at the most.
    assert before > 18 * LAYER
    assert after < activations(step) + 6 * LAYER
    gradients = sum(g.meta["val"].nbytes for g in step.gradients)
    assert gradients > 6 * LAYER


def test_a_global_norm_holds_every_update_back():
    step = canonical(clip=0.1)
    check(step, ReleaseGradients())
    order = list(step.computing())
    norm = next(i for i, n in enumerate(order) if "norm" in n.name)
    writes = [i for i, n in enumerate(order) if n.target is torch.ops.aten.copy_.default]
    assert norm < min(writes)
    assert norm > max(i for i, n in enumerate(order) if step.phase(n) is Phase.BACKWARD)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_micro_batches_update_in_the_last_backward(clip):
    step = canonical(micro_batches=2, clip=clip)
    before, after = check(step, ReleaseGradients())
    assert after < before
    order = list(step.computing())
    seeds = [i for i, n in enumerate(order) if "nll_loss_backward" in n.name]
    writes = [i for i, n in enumerate(order) if n.target is torch.ops.aten.copy_.default]
    assert len(seeds) == 2 and seeds[1] < min(writes)


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_gradients": True},
        {"optimizer": torch.optim.SGD, "momentum": 0.9},
        {"optimizer": torch.optim.Adam, "amsgrad": True},
        {"optimizer": torch.optim.SGD},
    ],
    ids=str,
)
@pytest.mark.table(4)
def test_other_loops(settings):
    before, after = check(canonical(**settings), ReleaseGradients())
    assert after < before


def test_it_is_deterministic_and_stable():
    texts = set()
    for _ in range(2):
        step = canonical()
        ReleaseGradients().run(step)
        texts.add(step.text())
    ReleaseGradients().run(step)
    assert texts == {step.text()}


def test_random_operators_keep_their_order():
    def rounding(p, q, x):  # the gradient of q comes first, its random numbers second
        loss = torch.mm(torch.mm(x, p), q).sum()
        upstream = torch.ops.aten.expand(seed(loss), (2, 4))
        of_q = gradient(torch.mm(torch.mm(x, p).t(), upstream))
        of_p = gradient(torch.mm(x.t(), torch.mm(upstream, q.t())))
        p.copy_(p - of_p * torch.rand_like(p))
        q.copy_(q - of_q * torch.rand_like(q))
        return loss

    step = by_hand(rounding, ("p", doubles(4, 4)), ("p", doubles(4, 4)), ("x", doubles(2, 4)))
    drawn = [n for n in step.computing() if "rand" in n.name]
    check(step, ReleaseGradients())
    assert [n for n in step.computing() if "rand" in n.name] == drawn


def test_a_read_through_a_view_comes_before_the_write():
    def late_view(p, q, x):
        view = p.t()
        loss = torch.mm(torch.mm(x, p), q).sum()
        upstream = torch.ops.aten.expand(seed(loss), (4, 4))
        of_p = gradient(torch.mm(x.t(), torch.mm(upstream, q.t())))
        of_q = gradient(torch.mm(view, upstream))  # reads p after its gradient is complete
        new_p, new_q = p - of_p, q - of_q
        p.copy_(new_p)
        q.copy_(new_q)
        return loss

    step = by_hand(late_view, *[("p", doubles(4, 4))] * 2, ("x", doubles(4, 4)))
    check(step, ReleaseGradients())  # verifies the order and compares the numbers


def test_nothing_to_do():
    step = by_hand(lambda x: torch.sin(x), ("x", doubles(2)))
    text = step.text()
    check(step, ReleaseGradients())
    assert step.text() == text


def test_a_model_is_refused():
    step = by_hand(lambda x: torch.sin(x), ("x", doubles(2)))
    step.kind = "model"
    assert "update" in ReleaseGradients().requires(step)
