"""The rewrites of ZeRO on graphs made by hand: which collectives a step has, and where."""

from __future__ import annotations

import pytest
import torch
from graphs import by_hand, gradient, seed

from memopt_compile.collectives import is_collective
from memopt_compile.errors import VerifyError
from memopt_compile.liveness import timeline
from memopt_compile.passes.bucket_collectives import BucketCollectives
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.cast_before_gather import CastBeforeGather
from memopt_compile.passes.gather_again import GatherAgain
from memopt_compile.passes.keep_parameters import KeepParameters
from memopt_compile.passes.prefetch_gathers import PrefetchGathers
from memopt_compile.passes.reduce_once import ReduceOnce
from memopt_compile.passes.update_early import UpdateEarly
from memopt_compile.step_graph import Phase, StepGraph, Window, op_name
from memopt_compile.zero import _input

OPS, RANKS = torch.ops._c10d_functional, 2


def gathered(rows):
    return OPS.wait_tensor(OPS.all_gather_into_tensor(rows, RANKS, "group"))


def scattered(gradient):
    return OPS.wait_tensor(OPS.reduce_scatter_tensor(gradient, "avg", RANKS, "group"))


def two_layers(p, q, x):
    """Each rank has 4 of 8 rows of p and 3 of 5 of q, which is used last."""
    w = gathered(p)
    a = x @ w.t()
    v = gathered(q)[:5]
    b = a @ v.t()
    loss = b.sum()
    db = seed(loss).expand_as(b)
    da = db @ v
    dq = gradient(scattered(torch.nn.functional.pad(db.t() @ a, [0, 0, 0, 1])))
    dp = gradient(scattered(da.t() @ x * (da @ w).sum()))
    q.copy_(q - dq)
    p.copy_(p - dp)
    return loss


def layered(fn=two_layers):
    step = by_hand(fn, ("p", torch.rand(4, 8)), ("p", torch.rand(3, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    step.verify()
    return step


def calls(step: StepGraph) -> list[str]:
    return [f"{step.phase(n).value} {op_name(n)}" for n in step.computing() if is_collective(n)]


def test_parameters_are_gathered_again_for_backward():
    step = layered()
    before = calls(step)
    GatherAgain().run(step)
    step.verify()
    assert before[:2] == 2 * ["forward all_gather_into_tensor"] and len(before) == 4
    # p again: q is gathered behind it. Nothing is gathered behind q, which is still there.
    assert calls(step) == [*before[:3], "backward all_gather_into_tensor", before[3]]


def test_what_is_used_again_at_once_is_not_gathered_again():
    def one_layer(p, x):
        w = gathered(p)
        loss = (x @ w.t()).sum()
        p.copy_(p - gradient(scattered(seed(loss) * w)))
        return loss

    step = by_hand(one_layer, ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    text = step.text()
    GatherAgain().run(step)
    assert step.text() == text


def cast_layer(p, x):
    w = gathered(p)[:7]
    h = w.to(torch.bfloat16)
    loss = (x.to(torch.bfloat16) @ h.t()).sum()
    p.copy_(p - gradient(scattered(torch.nn.functional.pad(
        (seed(loss) * h).to(torch.float32), [0, 0, 0, 1]))))
    return loss


def test_parameters_are_gathered_in_the_type_that_they_are_read_in():
    step = by_hand(cast_layer, ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    CastBeforeGather().run(step)
    step.verify()
    launch = next(filter(is_collective, step.computing()))
    assert op_name(launch.args[0]) == "_to_copy" and launch.meta["val"].dtype == torch.bfloat16
    assert launch.meta["val"].shape == (8, 8)


def test_parameters_that_are_read_as_they_are_too_are_not_cast():
    def read_twice(p, x):
        w = gathered(p)
        return w.to(torch.bfloat16).sum() + w.sum()

    step = by_hand(read_twice, ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    text = step.text()
    CastBeforeGather().run(step)
    assert step.text() == text


def kept(step: StepGraph) -> StepGraph:
    """The step with whole parameters as further inputs."""
    windows = []
    for node, rows, start in zip(step.placeholders[:2], (8, 5), (0, 0)):
        value = node.meta["val"]
        whole = _input(step, f"whole_{node.name}", value.new_empty(rows, 8))
        step.inputs += (step.inputs[0].__class__(whole.name, step.inputs[0].role, "p", 0, True),)
        windows.append(Window(node.name, whole.name, start, -(-rows // RANKS), RANKS, "group"))
    step.windows = tuple(windows)
    return step


def test_whole_parameters_are_gathered_once_behind_their_update():
    step = kept(layered())
    before = timeline(step).transient_peak_bytes
    UpdateEarly().run(step)
    KeepParameters().run(step)
    step.verify()
    assert KeepParameters().ensures(step) is None
    assert calls(step) == ["backward reduce_scatter_tensor", "update all_gather_into_tensor"] * 2
    assert timeline(step).transient_peak_bytes < before
    wholes = {w.full for w in step.windows}
    assert {n.args[0].name for n in step.computing() if op_name(n) == "copy_"} == wholes


def test_nothing_to_keep():
    assert KeepParameters().requires(layered()) == "no parameter is kept whole"


def biased(p, b, c, x):
    """Two layers with biases, which are updated as soon as their gradients are there."""
    w, v, u = gathered(p), gathered(b), gathered(c)
    a = x @ w.t() + v
    loss = (a * u).sum()
    da = seed(loss) * u.expand_as(a)
    c.copy_(c - gradient(scattered(a.sum(0))))
    p.copy_(p - gradient(scattered(da.t() @ x)))
    b.copy_(b - gradient(scattered(da.sum(0))))
    return loss


def with_biases():
    step = by_hand(biased, ("p", torch.rand(4, 8)), ("p", torch.rand(4)), ("p", torch.rand(4)),
                   ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    UpdateEarly().run(step)
    step.verify()
    return step


def test_small_ones_travel_together():
    step = with_biases()
    assert len(calls(step)) == 6
    BucketCollectives().run(step)
    step.verify()
    assert step.bucket_bytes == 8 * 8 * 4 // 4
    assert calls(step) == [
        "forward all_gather_into_tensor", "forward all_gather_into_tensor_coalesced",
        "backward reduce_scatter_tensor", "backward reduce_scatter_tensor_coalesced"]


@pytest.mark.parametrize(("cap", "count"), [(31, 6), (63, 6), (64, 4), (319, 4), (320, 2)])
def test_no_bucket_is_above_its_cap(cap, count):
    """A weight of 256 bytes, two biases of 32."""
    step = with_biases()
    BucketCollectives(cap).run(step)
    step.verify()
    assert len(calls(step)) == count
    if count < 6:
        step.bucket_bytes = 63
        with pytest.raises(VerifyError, match="B at once, above 63"):
            step.verify()


def test_no_bucket_of_forward_and_backward():
    step = with_biases()
    BucketCollectives().run(step)
    bucket = next(n for n in step.computing() if op_name(n) == "all_gather_into_tensor_coalesced")
    step.phases[next(iter(next(iter(bucket.users)).users))] = Phase.BACKWARD
    with pytest.raises(VerifyError, match="has parts of forward and of backward"):
        step.verify()


def test_an_update_between_two_keeps_them_apart():
    """The second gradient needs the first one's sum over ranks."""
    def chained(b, c, x):
        loss = (x * 2).sum()
        dy = seed(loss)
        first = gradient(scattered(x * dy))
        second = gradient(scattered(torch.cat([first, first]) * x))
        b.copy_(b - first)
        c.copy_(c - second)
        return loss

    step = by_hand(chained, ("p", torch.rand(4)), ("p", torch.rand(4)), ("x", torch.rand(8)))
    Canonicalize().run(step)
    BucketCollectives(1000).run(step)
    step.verify()
    assert len(calls(step)) == 2


def two_parts(p, x):
    loss = (x * 2).sum()
    dy = seed(loss)
    p.copy_(p - gradient(scattered(x * dy) + scattered(x + dy)))
    return loss


def parts():
    step = by_hand(two_parts, ("p", torch.rand(4, 8)), ("x", torch.rand(8, 8)))
    Canonicalize().run(step)
    return step


def test_parts_of_a_gradient_are_added_up_first():
    step = parts()
    ReduceOnce().run(step)
    step.verify()
    assert len(calls(step)) == 1
    scatter, = filter(is_collective, step.computing())
    assert op_name(scatter.args[0]) == "add"
    assert step.phase(scatter.args[0]) is Phase.BACKWARD


@pytest.mark.parametrize(("across", "count"), [(False, 2), (True, 1)])
def test_gradients_of_micro_batches_only_where_asked(across, count):
    step = parts()
    added = next(n for n in step.computing() if op_name(n) == "add" and n.args[1].op != "placeholder"
                 and op_name(n.args[0]) == "wait_tensor")
    for i, part in enumerate(added.args, 1):
        step.gradients[part] = i
    ReduceOnce(across=across).run(step)
    step.verify()
    assert len(calls(step)) == count


def test_parts_that_others_read_stay():
    def read_elsewhere(p, x):
        a, b = scattered(x), scattered(x * 2)
        p.copy_(a + b)
        return a.sum()

    step = by_hand(read_elsewhere, ("p", torch.rand(4, 8)), ("x", torch.rand(8, 8)))
    ReduceOnce(across=True).run(step)
    assert len(calls(step)) == 2


def test_what_is_being_sent_is_not_written():
    def written(p, x):
        launched = OPS.all_gather_into_tensor(p, RANKS, "group")
        p.copy_(x)
        return OPS.wait_tensor(launched).sum()

    step = by_hand(written, ("p", torch.rand(4)), ("x", torch.rand(4)))
    launch, = filter(is_collective, step.computing())
    write = next(n for n in step.computing() if op_name(n) == "copy_")
    wait, = launch.users
    total, = wait.users
    step.reorder([launch, write, wait, total])
    with pytest.raises(VerifyError, match="reads a value after copy_.* has overwritten it"):
        step.verify()
    step.reorder([launch, wait, write, total])
    step.verify()


def test_what_has_not_come_is_not_read():
    step = by_hand(lambda x: gathered(x).sum(), ("x", torch.rand(4)))
    wait = next(n for n in step.computing() if op_name(n) == "wait_tensor")
    wait.replace_all_uses_with(wait.args[0])
    wait.args = (wait.args[0],)
    with pytest.raises(VerifyError, match="is read before it has come"):
        step.verify()

def three_layers(p, q, r, x):
    """The peak is behind the products: an expanded x needs 16 times as much."""
    a = torch.tanh(x @ gathered(p).t())
    b = torch.tanh(a @ gathered(q).t())
    c = b @ gathered(r).t()
    return (c.repeat(16, 1) * 2).sum()


def launches_and_products(step):
    return [op_name(n) for n in step.computing() if is_collective(n) or op_name(n) == "mm"]


@pytest.mark.parametrize("peak_bytes", [1 << 20, 0])
def test_parameters_are_gathered_a_layer_ahead(peak_bytes):
    """With a budget that has room, and without one where the peak is elsewhere."""
    rows = torch.rand(4, 8)
    step = by_hand(three_layers, ("p", rows), ("p", rows.clone()), ("p", rows.clone()), ("x", torch.rand(8, 8)))
    Canonicalize().run(step)
    before, peak = [n for n in step.computing() if is_collective(n)], timeline(step).peak_bytes
    PrefetchGathers(peak_bytes).run(step)
    step.verify()
    gather = "all_gather_into_tensor"
    assert launches_and_products(step) == [gather, gather, "mm", gather, "mm", "mm"]
    assert [n for n in step.computing() if is_collective(n)] == before
    assert timeline(step).peak_bytes <= max(peak, peak_bytes)


def test_nothing_is_gathered_ahead_that_a_budget_has_no_room_for():
    def two(p, q, x):
        return (x @ gathered(p).t() @ gathered(q).t()).sum()

    step = by_hand(two, ("p", torch.rand(4, 8)), ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    text = step.text()
    PrefetchGathers(0).run(step)
    assert step.text() == text


def test_a_gather_does_not_pass_another_collective():
    def between(p, q, x):
        a = x @ gathered(p).t()
        s = OPS.wait_tensor(OPS.all_reduce(a, "sum", "group"))
        b = torch.tanh(x * 2)
        return ((b + s) @ gathered(q).t()).sum()

    step = by_hand(between, ("p", torch.rand(4, 8)), ("p", torch.rand(4, 8)), ("x", torch.rand(8, 8)))
    Canonicalize().run(step)
    before = [n for n in step.computing() if is_collective(n)]
    PrefetchGathers(1 << 20).run(step)
    step.verify()
    order = list(step.computing())
    assert [n for n in order if is_collective(n)] == before
    assert order.index(before[2]) == order.index(before[1]) + 1
