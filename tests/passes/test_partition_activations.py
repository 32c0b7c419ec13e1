"""Activations in parts: the pass by itself, and which values ranks have alike, without ranks."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from graphs import (
    by_hand,
    captured,
    gradient,
    mlp,
    ordinary_step,
    outcome,
    seed,
    training_step,
    two_layers,
    values_for,
)

from memopt_compile import partition
from memopt_compile.backends import eager
from memopt_compile.compat import trace
from memopt_compile.compression import COMPRESS
from memopt_compile.distributed.tensor_parallel import Group, fingerprint
from memopt_compile.liveness import timeline
from memopt_compile.memory_plan import MemoryPlan
from memopt_compile.partition import RANKS, RANKS_HOST
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.compress import Compress
from memopt_compile.passes.offload import Offload
from memopt_compile.passes.partition_activations import PartitionActivations
from memopt_compile.passes.plan_memory import PlanMemory
from memopt_compile.passes.recompute import Recompute
from memopt_compile.planning.rematerialization import Means
from memopt_compile.planning.replicated import alike
from memopt_compile.transfers import TO_HOST

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Ranks(Group):
    """A group whose other ranks say what `others` make of what this one says."""

    def exchange(self, value):
        return [value, *(self.mesh(value) for _ in range(self.ranks - 1))]


def of_two(step, others=lambda value: value, random=True, without=()):
    step.parallel = Ranks("0", 0, 2, others, frozenset(i.name for i in step.inputs if i.name not in without),
                          random)
    return step


def in_parts(step, *names, form=RANKS, again=()):
    step.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(again), tuple((n, form) for n in names))
    for each in (Recompute(), PartitionActivations()):
        if each.requires(step) is None:
            each.run(step)
            step.verify()
    return step


def lines(step, *words):
    return [line.strip() for line in step.text().splitlines() if any(w in line for w in words)]


GATHERED = ["all_gather_into_tensor_0: f64[32] = all_gather_into_tensor({}, 2, 0)",
            "wait_tensor_0: f64[32] = wait_tensor(all_gather_into_tensor_0)",
            "as_strided_0: f64[8, 4] = as_strided(wait_tensor_0, [8, 4], [4, 1], 0)",
            "t_0: f64[4, 8] = t(as_strided_0)"]


def test_golden():
    step = in_parts(of_two(two_layers()), "tanh")
    assert lines(step, "tanh", "part", "gather", "as_strided", "ward:") == [
        "forward:", "tanh_0: f64[8, 4] = tanh(mm_0)", "mm_1: f64[8, 4] = mm(tanh_0, p1)",
        "part_0: f64[16] = part(tanh_0, 0, 2)", "backward:", *(g.format("part_0") for g in GATHERED)]


def test_golden_in_host_memory():
    step = in_parts(of_two(two_layers()), "tanh", form=RANKS_HOST)
    assert lines(step, "part", "host", "sent", "arrived", "gather", "as_strided", "ward:") == [
        "forward:", "part_0: f64[16] = part(tanh_0, 0, 2)", "to_host_0: f64[16] = to_host(part_0)",
        "sent_0: f64[16] = sent(to_host_0, part_0)", "backward:",
        "from_host_0: f64[16] = from_host(sent_0, cpu)", "arrived_0: f64[16] = arrived(from_host_0)",
        *(g.format("arrived_0") for g in GATHERED)]


def test_nothing_to_do():
    step = two_layers()
    assert "no activation" in PartitionActivations().requires(step)
    step.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(), (("tanh", "int8"),))
    assert "no activation" in PartitionActivations().requires(step)


def test_what_runs_again_reads_what_was_gathered():
    step = in_parts(of_two(two_layers()), "mm", again=["tanh"])
    whole, = step.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert {u.target.__name__.split(".")[0] for u in whole.users} == {"tanh", "cos"}


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/found", rank=0, world_size=1)
    yield Ranks(dist.group.WORLD.group_name, 0, 1, None, random=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("form", [RANKS, RANKS_HOST])
@pytest.mark.parametrize("columns_first", [False, True])
def test_the_same_bits(one_rank, form, columns_first):
    """With a group of one, whose part is the whole; also of values that lie in memory by columns."""
    def step(x, w):
        h = torch.tanh(x.t() @ w if columns_first else x @ w)
        h = h.t() if columns_first else h
        loss = h.square().sum()
        seed(loss)
        return gradient((h * (1 - h * h)).sum(0)), loss

    graph = by_hand(step, ("x", torch.randn(6, 6)), ("p", torch.randn(6, 6)))
    Canonicalize().run(graph)
    twin = graph.copy()
    twin.parallel = one_rank
    in_parts(twin, "tanh", form=form)
    values = values_for(graph)
    for a, b in zip(outcome(eager.lower(graph), values), outcome(eager.lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_the_parts_of_all_ranks_are_the_value():
    for value in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(2, 3, 4).permute(2, 0, 1)):
        whole = torch.cat([partition.PART(value, rank, 3) for rank in range(3)])
        assert torch.equal(whole.as_strided(value.size(), value.stride()), value)


@pytest.mark.parametrize("value", [torch.ones(4, 6).int(), torch.ones(5, 3), torch.ones(4, 12)[:, ::2]])
def test_what_is_not_parted(value):
    """Integers, what the ranks cannot share evenly, and what has gaps."""
    assert not partition.can_be_parted(value, 2)


def test_the_peak_is_the_planned_one():
    step = of_two(training_step(torch.nn.Sequential(*(m for _ in range(6) for m in (
        torch.nn.Linear(32, 32), torch.nn.GELU()))).double(), batch=256))
    Canonicalize().run(step)
    peak = timeline(step)
    limit = peak.resident_bytes + int(0.75 * peak.transient_peak_bytes)
    PlanMemory(limit, torch.device("cpu"), Means(again=False, parts=True)).run(step)
    PartitionActivations().run(step)
    step.verify()
    assert {d.choice for d in step.plan.decisions} == {"keep", "partition"}
    assert timeline(step).transient_peak_bytes == step.plan.peak_bytes <= limit - peak.resident_bytes


@pytest.mark.parametrize("means", [Means(again=False, parts=True), Means(again=False, host=True)])
def test_sizes_that_vary_are_planned_as_they_are_now(means):
    """A last short batch makes sizes symbolic."""
    model = mlp(4)
    x, y = torch.randn(256, 32, dtype=torch.float64), torch.zeros(256, dtype=torch.int64)
    for each in (x, y):
        trace.let_batch_vary(each)
    step = of_two(captured(ordinary_step(model, torch.optim.SGD(model.parameters())), x, y))
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in step.placeholders)
    Canonicalize().run(step)
    peak = timeline(step)
    limit = peak.resident_bytes + int(0.9 * peak.transient_peak_bytes)
    PlanMemory(limit, torch.device("cpu"), means).run(step)
    assert step.plan.packed
    for each in (PartitionActivations(), Offload()):
        if each.requires(step) is None:
            each.run(step)
            step.verify()
    assert timeline(step).peak_bytes <= limit


def with_words(fn):
    """The captured step of `fn(x, w)`, whose operators have the names of the values."""
    return by_hand(fn, ("x", torch.randn(8, 4)), ("p", torch.randn(4, 4)))


def names_alike(step, **how):
    found = alike(of_two(step, **how))
    return {n.name for n in step.computing() if n in found}


def test_alike_are_results_of_the_group_and_what_follows():
    def fn(x, w):
        mine = torch.tanh(x @ w)
        summed = c10d.wait_tensor(c10d.all_reduce(mine, "sum", "0"))
        other = c10d.wait_tensor(c10d.all_reduce(mine, "sum", "1"))
        return torch.exp(summed), torch.exp(other)

    step = with_words(fn)
    everything = names_alike(step)
    assert {"tanh", "exp"} <= everything and "exp_1" not in everything  # another group's sum
    second, = (i.name for i in step.inputs if i.role.name == "PARAMETER")
    own = names_alike(step, without=[second])
    assert "exp" in own and not own & {"mm", "tanh", "exp_1"}


def test_a_rank_that_takes_its_own_chunk_has_it_alone():
    step = with_words(lambda x, w: (torch.exp((x @ w)[2:4]), torch.sin(x)))

    chunk = next(i for i, n in enumerate(step.graph.nodes) if n.target is aten.slice.Tensor)
    found = names_alike(step, others=lambda texts: [*texts[:chunk], "other rows", *texts[chunk + 1:]])
    assert "sin" in found and "mm" in found and "exp" not in found


def test_an_input_that_the_step_writes_its_own_values_to_is_its_own():
    def fn(x, w, mine):
        h = torch.exp(w)
        w.copy_(w - mine)
        return h, torch.sin(x)

    step = by_hand(fn, ("x", torch.randn(4)), ("p", torch.randn(4)), ("s", torch.randn(4)))
    state, = (i.name for i in step.inputs if i.role.name == "STATE")
    assert {"exp", "sin"} <= names_alike(step)
    assert names_alike(step, without=[state]) & {"exp", "sin"} == {"sin"}


def test_random_numbers_are_alike_if_the_generators_are():
    """They are drawn into memory of which nothing is read."""
    def fn(x, w):
        mask = aten.bernoulli.p(torch.empty_like(x), 0.5)
        return x * mask, torch.sin(x)

    assert {"sin", "bernoulli", "mul"} <= names_alike(with_words(fn))
    assert names_alike(with_words(fn), random=False) & {"sin", "bernoulli", "mul"} == {"sin"}


def test_what_is_not_set_is_not_alike():
    assert names_alike(with_words(lambda x, w: torch.exp(torch.empty_like(x)))) == set()


def test_graphs_of_other_lengths_have_nothing_alike():
    assert not names_alike(two_layers(), others=lambda texts: texts[:-1])


def test_fingerprint():
    """Of any type and size: of a change anywhere, and of the order."""
    for tensor in (torch.randn(7, 13, 5), torch.randint(50000, (8, 1024)), torch.rand(3) > 0.5,
                   torch.randn(70_000, dtype=torch.float64), torch.randn(9).bfloat16()):
        changed = tensor.clone()
        changed.view(-1)[-1] = changed.view(-1)[-1] == 0
        flipped = tensor.flip(0)
        assert fingerprint(tensor) == fingerprint(tensor.clone()) != fingerprint(changed)
        assert torch.equal(flipped, tensor) or fingerprint(flipped) != fingerprint(tensor)


def test_the_group_is_kept_by_copies():
    step = of_two(two_layers())
    assert dataclasses.replace(step.parallel) == step.copy().parallel


@pytest.mark.parametrize("form", [RANKS, RANKS_HOST, "host", "int8"])
def test_of_what_a_collective_brings_the_wait_is_read(form):
    """A sum over ranks that backward reads: it is there behind its wait."""
    def step(x, w):
        h = c10d.wait_tensor(c10d.all_reduce(x @ w, "sum", "0"))
        loss = torch.tanh(h).sum()
        seed(loss)
        return gradient((1 - torch.tanh(h) ** 2).sum(0)), loss

    graph = of_two(by_hand(step, ("x", torch.randn(6, 6)), ("p", torch.randn(6, 6))))
    in_parts(graph, "all_reduce", form=form)
    for each in (Compress(), Offload()):
        if each.requires(graph) is None:
            each.run(graph)
            graph.verify()
    call, = graph.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    wait, = call.users
    kept = {u.target for u in wait.users} & {partition.PART, TO_HOST, COMPRESS}
    assert len(kept) == 1 and graph.op_counts()["wait_tensor"] == 1 + (form in (RANKS, RANKS_HOST))
