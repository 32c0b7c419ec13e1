"""Gathered parameters and gradients on their way, in one buffer."""

from __future__ import annotations

import pytest
import torch
from graphs import by_hand, gradient, seed, training_step
from test_zero import OPS, RANKS, gathered, layered, scattered, with_biases

from memopt_compile.arena import WINDOW, arena_of
from memopt_compile.backends import inductor
from memopt_compile.collectives import GATHER, is_wait
from memopt_compile.errors import OptionError, VerifyError
from memopt_compile.liveness import lifetimes, resident_bytes, timeline
from memopt_compile.options import Options
from memopt_compile.passes.bucket_collectives import BucketCollectives
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.place_in_arena import PlaceInArena
from memopt_compile.step_graph import mutated_args, op_name, storage_roots

GOLDEN = """\
p0: f32[4, 8]  # parameter trained
x0: f32[2, 8]  # batch
a0: u8[256]  # arena
forward:
  window_0: f32[8, 8] = window(a0, 0, [8, 8], torch.float32)
  all_gather_into_tensor_out_0: f32[8, 8] = all_gather_into_tensor_out(p0, 2, group, out=window_0)
  wait_tensor_0: f32[8, 8] = wait_tensor(all_gather_into_tensor_out_0)
  mm_0: f32[2, 8] = mm(x0, wait_tensor_0)
  sum_0: f32[] = sum(mm_0)
  t_0: f32[8, 2] = t(x0)
backward:
  full_0: f32[] = full([], 1, device=cpu, dtype=torch.float32, pin_memory=False)
  expand_0: f32[2, 8] = expand(full_0, [2, 8])
  window_1: f32[8, 8] = window(a0, 0, [8, 8], torch.float32)
  mm_1: f32[8, 8] = mm.out(t_0, expand_0, out=window_1)
  reduce_scatter_tensor_0: f32[4, 8] = reduce_scatter_tensor(mm_1, avg, 2, group)
  wait_tensor_1: f32[4, 8] = wait_tensor(reduce_scatter_tensor_0)
update:
  sub_0: f32[4, 8] = sub(p0, wait_tensor_1)
  copy_0: f32[4, 8] = copy_(p0, sub_0)
return sum_0
"""


def one_layer(p, x):
    loss = (x @ gathered(p)).sum()
    p.copy_(p - gradient(scattered(x.t() @ seed(loss).expand(2, 8))))
    return loss


def placed(step, rise=9.0, **how):
    """With an arena for all of them, though such a small step has its peak elsewhere."""
    each = PlaceInArena(rise=rise, **how)
    each.run(step)
    step.verify()
    return arena_of(step.graph, storage_roots(step.graph))


def small():
    step = by_hand(one_layer, ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    return step


def test_parameter_and_gradient_follow_each_other():
    step = small()
    before, resident = timeline(step), resident_bytes(step)
    arena = placed(step)
    assert step.text() == GOLDEN
    assert arena.nbytes == arena.lower_bound_bytes == 256 and arena.lost_bytes == 0
    assert resident_bytes(step) == resident + 256
    # The gradient no longer counts; and the update, which has no tenant, pays for the arena.
    assert (before.peak_bytes, timeline(step).peak_bytes) == (580, 708)


def test_a_plan_never_counts_a_tenant_twice():
    step = layered()
    gathers, before = step.op_counts()["all_gather_into_tensor"], timeline(step)
    arena = placed(step)
    assert len(arena.tenants) > gathers and not any(n.target is GATHER for n in step.computing())
    after = timeline(step)
    assert before.peak_bytes - arena.lower_bound_bytes <= after.transient_peak_bytes + after.resident_bytes
    assert after.peak_bytes <= before.peak_bytes + arena.nbytes


@pytest.mark.parametrize("products_only", [True, False])
def test_products_alone_where_a_compiler_fuses_the_rest(products_only):
    step = with_biases()
    placed(step, products_only=products_only)
    writers = {op_name(n).split(".")[0] for n in step.computing() if any(a.target is WINDOW for a in mutated_args(n))}
    assert writers == {"mm", "all_gather_into_tensor_out"} | (set() if products_only else {"sum"})


def test_a_bucket_writes_there_too():
    step = with_biases()
    BucketCollectives().run(step)
    names = {name: count for name, count in step.op_counts().items() if "gather" in name or "scatter" in name}
    arena = placed(step)
    counts = step.op_counts()
    assert {name.removesuffix("_out"): counts[name] for name in counts if "gather" in name or "scatter" in name} == names
    assert "all_gather_into_tensor_coalesced_out" in counts
    assert sorted(t.nbytes for t in arena.tenants) == [32, 32, 32, 32, 256, 256]  # three parameters and gradients
    bias = next(n for n in step.graph.nodes if op_name(n) == "getitem")
    assert len(storage_roots(step.graph)[bias]) == 1
    assert not any("gather" in op_name(n) for n in lifetimes(step.graph).size)


def test_a_bucket_that_finds_no_place_leaves_no_gap():
    step = with_biases()
    BucketCollectives().run(step)
    arena = placed(step, 0.02)
    assert "all_gather_into_tensor_coalesced" in step.op_counts()
    assert [t.nbytes for t in arena.tenants] == [arena.nbytes] == [32]  # a gradient alone


def test_a_bucket_of_which_one_is_returned_has_memory_of_its_own():
    def returned(p, b, c, x):
        first, second = OPS.all_gather_into_tensor_coalesced([b, c], RANKS, "group")
        return (x @ gathered(p)).sum() + OPS.wait_tensor(first).sum(), OPS.wait_tensor(second)

    step = by_hand(returned, ("p", torch.rand(4, 8)), ("p", torch.rand(4)), ("p", torch.rand(4)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    assert [t.nbytes for t in placed(step).tenants] == [256]


def test_no_result_of_the_step_is_a_tenant():
    def returned(p, q, x):
        return gathered(p).t(), (x @ gathered(q)).sum()

    step = by_hand(returned, ("p", torch.rand(4, 8)), ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    assert len(placed(step).tenants) == 1


def test_nothing_to_place():
    step = by_hand(lambda x: x.sum(), ("x", torch.rand(4)))
    assert PlaceInArena().requires(step) == "nothing is gathered or scattered"

    def all_of_it_is_returned(p):
        return gathered(p)

    step = by_hand(all_of_it_is_returned, ("p", torch.rand(4)))
    text = step.text()
    assert placed(step) is None and step.text() == text


@pytest.mark.parametrize(("rise", "sizes"), [
    (0.02, []), (0.05, [32] * 3), (0.2, [32] * 2 + [256] * 2), (0.5, [32] * 4 + [256] * 2)])
def test_the_arena_is_the_largest_that_the_peak_has_room_for(rise, sizes):
    step = with_biases()
    before = timeline(step).peak_bytes
    arena = placed(step, rise)
    assert sorted(t.nbytes for t in arena.tenants) == sizes if sizes else arena is None
    assert timeline(step).peak_bytes <= before * (1 + rise)


def test_is_refused_without_shards():
    with pytest.raises(OptionError, match="give zero=1, 2 or 3 too"):
        Options(arena=True)


def two_at_once():
    def both(p, q, x):
        return (x @ gathered(p) @ gathered(q)).sum()

    step = by_hand(both, ("p", torch.rand(4, 8)), ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    return step


def test_what_is_still_read_or_on_its_way_is_not_overwritten():
    step = two_at_once()
    arena = placed(step)
    assert arena.nbytes == 256  # one after the other
    launches = [n for n in step.computing() if "all_gather" in op_name(n)]
    first, second = launches
    order = list(step.computing())
    early = [second.kwargs["out"], second]
    rest = [n for n in order if n not in early]
    products = [n for n in rest if op_name(n) == "mm"]
    for behind in (next(iter(first.users)), first):  # its wait; and before that, while it is coming
        at = rest.index(behind) + 1
        step.reorder([*rest[:at], *early, *rest[at:]])
        with pytest.raises(VerifyError, match="lies where .* still is"):
            step.verify()
    at = rest.index(products[0]) + 1
    step.reorder([*rest[:at], *early, *rest[at:]])
    step.verify()


def test_a_gradient_stays_until_it_has_been_sent():
    def scatters(p, q, x):
        a, b = OPS.reduce_scatter_tensor(x.t() @ x, "avg", RANKS, "group"), x.t() @ (x * 2)
        p.copy_(p - OPS.wait_tensor(a))
        q.copy_(q - scattered(b))
        return x.sum()

    step = by_hand(scatters, ("p", torch.rand(4, 8)), ("p", torch.rand(4, 8)), ("x", torch.rand(2, 8)))
    Canonicalize().run(step)
    first, second = placed(step).tenants
    wait = next(n for n in step.computing() if is_wait(n))
    assert list(step.graph.nodes).index(wait) == first.stop > second.start
    assert first.offset != second.offset


@pytest.mark.parametrize(("change", "what"), [
    (lambda window, output: setattr(window, "args", (window.args[0], 192, *window.args[2:])), "does not lie in"),
    (lambda window, output: setattr(output, "args", ((next(iter(window.users)),),)), "is a result of the step")])
def test_a_window_out_of_place_is_found(change, what):
    step = small()
    placed(step)
    change(step.graph.find_nodes(op="call_function", target=WINDOW)[-1], step.graph.output_node())
    with pytest.raises(VerifyError, match=what):
        step.verify()


def test_a_window_that_nothing_has_written_is_found():
    step = small()
    placed(step)
    product = next(n for n in step.computing() if op_name(n) == "mm")
    window = step.graph.find_nodes(op="call_function", target=WINDOW)[0]
    product.replace_input_with(product.args[1], window)
    launch = next(n for n in step.computing() if "all_gather" in op_name(n))
    wait = next(iter(launch.users))
    step.erase(wait)
    step.erase(launch)
    with pytest.raises(VerifyError, match="before anything has written it"):
        step.verify()


def test_one_piece_is_refused_under_inductor():
    step = small()
    placed(step, products_only=True)
    with pytest.raises(OptionError, match="tenants are written between pieces"):
        inductor.lower(step, whole=True)


def test_ordinary_steps_have_no_arena():
    step = training_step(torch.nn.Sequential(torch.nn.Linear(32, 4)).double())
    assert arena_of(step.graph, storage_roots(step.graph)) is None
