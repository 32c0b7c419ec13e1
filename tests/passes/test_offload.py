"""Activations in host memory: planned, sent and fetched, on the CPU, where only the peak is not what it
would be on a GPU."""

import pytest
import torch
from graphs import captured, mlp, ordinary_step, outcome, training_step, two_layers, values_for
from torch import nn

import memopt_compile as memopt
from memopt_compile import pipelines, programs
from memopt_compile.backends import eager, inductor
from memopt_compile.costs import workspace
from memopt_compile.errors import InfeasibleBudget, OptionError
from memopt_compile.liveness import no_workspace, timeline
from memopt_compile.memory_plan import MemoryPlan
from memopt_compile.options import Options, format_bytes
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.offload import Offload
from memopt_compile.passes.overlap_transfers import OverlapTransfers
from memopt_compile.passes.plan_memory import PlanMemory
from memopt_compile.passes.recompute import Recompute
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.planning.rematerialization import Means
from memopt_compile.records import Compilation
from memopt_compile.transfers import ARRIVED, FROM_HOST, SENT, TO_HOST

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ONLY_HOST = Means(again=False, host=True)


def away(step, *names, again=()):
    step.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(again), tuple((n, "host") for n in names))
    for each in (Recompute(), Offload()):
        if each.requires(step) is None:
            each.run(step)
            step.verify()
            assert each.ensures(step) is None
    return step


def lines(step, *words):
    return [line.strip() for line in step.text().splitlines() if any(w in line for w in words)]


def test_golden():
    step = away(two_layers(), "tanh")
    assert lines(step, "tanh", "host", "sent", "arrived", ":\n") == [
        "tanh_0: f64[8, 4] = tanh(mm_0)",
        "mm_1: f64[8, 4] = mm(tanh_0, p1)",
        "to_host_0: f64[8, 4] = to_host(tanh_0)",
        "sent_0: f64[8, 4] = sent(to_host_0, tanh_0)",
        "from_host_0: f64[8, 4] = from_host(sent_0, cpu)",
        "arrived_0: f64[8, 4] = arrived(from_host_0)",
        "t_0: f64[4, 8] = t(arrived_0)"]


def test_nothing_to_do():
    step = two_layers()
    assert "nothing is to wait" in Offload().requires(step)
    step.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(), (("tanh", "int8"),))
    assert "nothing is to wait" in Offload().requires(step)
    assert "nothing goes to the host" in OverlapTransfers(0, CPU).requires(step)


def test_what_runs_again_reads_what_came_back():
    step = away(two_layers(), "mm", again=["tanh"])
    arrived, = (n for n in step.computing() if n.target is ARRIVED)
    assert {u.target.__name__.split(".")[0] for u in arrived.users} == {"tanh", "cos"}


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_numbers_are_the_same_bits(lowering):
    """Through the pieces of Inductor the copies stand between pieces, where the plan has them."""
    step = training_step(mlp(4), batch=256, lowering=lowering)
    Canonicalize().run(step)
    twin = planned(step, 0.7)
    OverlapTransfers(timeline(twin).peak_bytes, CUDA).run(twin)
    twin.verify()
    lower = eager.lower if lowering == "eager" else inductor.lower
    values = values_for(step)
    for a, b in zip(outcome(lower(step), values), outcome(lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def planned(step, share, means=ONLY_HOST):
    """`step` within this share of what it holds beyond its inputs."""
    for each in (Canonicalize(), ScheduleForPeak()):
        each.run(step)
    peak, twin = timeline(step), step.copy()
    limit = peak.resident_bytes + int(share * peak.transient_peak_bytes)
    PlanMemory(limit, CUDA, means).run(twin)
    for each in (Recompute(), Offload()):
        if each.requires(twin) is None:
            each.run(twin)
            twin.verify()
    assert timeline(twin).peak_bytes <= limit
    return twin


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_the_peak_is_the_planned_one(share):
    twin = planned(training_step(mlp(6), batch=256), share)
    assert {d.choice for d in twin.plan.decisions} == {"keep", "offload"}
    assert timeline(twin).transient_peak_bytes == twin.plan.peak_bytes
    assert "wait in host memory" in str(twin.plan)


def test_the_cheaper_way_is_taken():
    """Products of this size take less than the link; what was drawn at random cannot run again."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3))]
    step = training_step(nn.Sequential(*layers, nn.Linear(32, 4)).double(), torch.optim.SGD, batch=512)
    twin = planned(step, 0.5, Means(host=True))
    made = {d.choice: {d.name.rsplit("_", 1)[0] for d in twin.plan.chosen(d.choice)}
            for d in twin.plan.decisions}
    assert made["recompute"] and made["offload"], made


def distances(step):
    """By transfer, how many operators stand between its beginning and its end."""
    place = {n: i for i, n in enumerate(step.computing())}
    return [place[n] - place[n.args[0]] for n in step.computing() if n.target in (SENT, ARRIVED)]


def test_copies_go_on_beside_other_work():
    twin = planned(training_step(mlp(6), batch=4096), 0.6)
    peak = timeline(twin).peak_bytes
    assert set(distances(twin)) == {1}
    tight = twin.copy()
    OverlapTransfers(peak, CUDA).run(tight)
    tight.verify()
    assert timeline(tight).peak_bytes == peak and sum(distances(tight)) > len(distances(tight))
    OverlapTransfers(2 * peak, CUDA).run(twin)
    twin.verify()
    assert sum(distances(twin)) > sum(distances(tight))
    assert [n.target for n in twin.computing() if n.target in (TO_HOST, SENT, FROM_HOST, ARRIVED)]


def test_dropout_and_norms_in_the_whole_pipeline():
    """Every other pass beside it, as for a GPU; the generator is left where it was, too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (
        nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.2))), nn.Linear(64, 4)).double()
    x, y = torch.randn(128, 64, dtype=torch.float64), torch.arange(128) % 4
    step = captured(ordinary_step(model, torch.optim.AdamW(model.parameters())), x, y)
    plain, _ = pipelines.rewritten(step.copy(), Options(lowering="eager"), "eager", no_workspace)
    limit = timeline(plain).resident_bytes + int(0.5 * timeline(plain).transient_peak_bytes)
    options = Options(lowering="eager", offload=True, recompute=False, memory_budget=limit)
    twin, _ = pipelines.rewritten(step.copy(), options, "eager", no_workspace, limit, CUDA)
    assert timeline(twin).peak_bytes <= limit and twin.plan.chosen("offload")
    values = values_for(step)
    results = []
    for each in (plain, twin):
        torch.manual_seed(1)
        results.append(outcome(eager.lower(each), values))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results))


def refusal_of(step, limit, device, **options):
    made = Options(lowering="eager", memory_budget=limit, **options)
    with pytest.raises(InfeasibleBudget) as refusal:
        programs.fitted(step.copy(), Compilation("step", made, "eager", "here", device=device))
    return refusal.value.do


def test_a_refusal_on_a_gpu_has_the_price_of_host_memory():
    step = training_step(mlp(4), batch=256)
    limit = timeline(step).resident_bytes + 4096
    options = Options(lowering="eager", memory_budget=limit, offload=True)
    twin, _ = pipelines.rewritten(step.copy(), options, "eager", workspace(step), limit, CUDA)
    price = f"allow offload=True: {format_bytes(timeline(twin, workspace(step)).peak_bytes)}, "
    assert price in refusal_of(step, limit, CUDA)
    assert "offload" not in refusal_of(step, limit, CPU) + refusal_of(step, limit, CUDA, offload=True)


def test_one_piece_is_refused():
    with pytest.raises(OptionError, match="one piece"):
        inductor.lower(away(two_layers(), "tanh"), whole=True)


@pytest.mark.inductor
def test_what_is_in_host_memory_is_not_in_the_predicted_peak_of_inductor():
    step = training_step(mlp(4), batch=2048, lowering="inductor")
    twin = planned(step, 0.6)
    kept, less = (inductor.predicted_transient_peak(inductor.lower(each)) for each in (step, twin))
    assert less <= 0.85 * kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_on_cuda(lowering):
    """Numbers as without, and a peak that is smaller by what waits in host memory."""
    def trained(**options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = memopt.compile(ordinary_step(model, opt), lowering=lowering, **options)
        x, y = torch.randn(4096, 1024, device="cuda"), torch.arange(4096, device="cuda") % 1024
        losses = [float(run(x, y)) for _ in range(4)]
        return losses, memopt.measure(run, x, y, resident=(model, opt)).peak_bytes

    plain, peak = trained()
    losses, less = trained(memory_budget=int(0.8 * peak), recompute=False, offload=True)
    assert losses == pytest.approx(plain, rel=1e-4) and less <= 0.8 * peak
