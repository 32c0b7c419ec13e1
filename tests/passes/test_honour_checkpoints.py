import functools

import pytest
import torch
import torch.nn.functional as F
from graphs import captured, check
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memopt_compile as memopt
from memopt_compile.liveness import no_workspace, timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.honour_checkpoints import HonourCheckpoints
from memopt_compile.passes.rematerialize_free import RematerializeFree
from memopt_compile.passes.replay_dropout import ReplayDropout
from memopt_compile.planning.rematerialization import Means, problem


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.up, self.down, self.p = nn.Linear(16, 64), nn.Linear(64, 16), p

    def forward(self, x):
        return x + self.down(F.dropout(F.gelu(self.up(x)), self.p, True))


class Stack(nn.Module):
    """Blocks, each in a checkpoint if asked for."""

    def __init__(self, p=0.0, marked=True, contexts=None, layers=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p) for _ in range(layers))
        self.head, self.marked = nn.Linear(16, 4), marked
        self.settings = {"use_reentrant": False, **({"context_fn": contexts} if contexts else {})}

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings) if self.marked else block(x)
        return self.head(x)


def make(micro_batches=1, **kind):
    torch.manual_seed(0)
    model = Stack(**kind).double()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, y):
        for inputs, labels in memopt.micro_batches(micro_batches, x, y):
            loss = F.cross_entropy(model(inputs), labels) / micro_batches
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, (torch.randn(64, 16).double(), torch.randint(4, (64,))), model


def prepared(**kind):
    step, args, _ = make(**kind)
    step = captured(step, *args)
    Canonicalize().run(step)
    return step


def gelus(step):
    return sum(n.target is torch.ops.aten.gelu.default for n in step.computing())


def test_golden():
    step = prepared(layers=1)
    check(step, HonourCheckpoints())
    backward = step.text().split("backward:\n")[1].split("update:")[0]
    assert backward == """\
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  div_1: f64[] = div(full_0, 1)
  nll_loss_backward_0: f64[64, 4] = nll_loss_backward(div_1, log_softmax_0, x1, None, 1, -100, getitem_1)
  log_softmax_backward_data_0: f64[64, 4] = _log_softmax_backward_data(nll_loss_backward_0, log_softmax_0, 1, torch.float64)
  mm_0: f64[64, 16] = mm(log_softmax_backward_data_0, p4)
  t_3: f64[4, 64] = t(log_softmax_backward_data_0)
  mm_1: f64[4, 16] = mm(t_3, add_0)
  sum_0: f64[4] = sum.dim_IntList(log_softmax_backward_data_0, [0])
  mm_2: f64[64, 64] = mm(mm_0, p2)
  t_4: f64[16, 64] = t(mm_0)
  addmm_3: f64[64, 64] = addmm(p1, x0, t_0)
  gelu_1: f64[64, 64] = gelu(addmm_3)
  mm_3: f64[16, 64] = mm(t_4, gelu_1)
  sum_1: f64[16] = sum.dim_IntList(mm_0, [0])
  gelu_backward_0: f64[64, 64] = gelu_backward(mm_2, addmm_3)
  t_5: f64[64, 64] = t(gelu_backward_0)
  mm_4: f64[64, 16] = mm(t_5, x0)
  sum_2: f64[64] = sum.dim_IntList(gelu_backward_0, [0])
"""


def test_each_region_runs_again():
    step = prepared()
    before, after = check(step, HonourCheckpoints())
    assert gelus(step) == 8 and after < before


def test_nothing_is_checkpointed():
    assert "nothing" in HonourCheckpoints().requires(prepared(marked=False))


def test_dropout_is_not_drawn_again():
    step = prepared(p=0.5)
    check(step, ReplayDropout(), HonourCheckpoints(), slack=64 * 64 * 8)
    draws = [n for n in step.computing() if n.target is torch.ops.aten.bernoulli.p]
    assert len(draws) == 4 and gelus(step) == 8


def save_products(context, operator, *args, **kwargs):
    product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_is_honoured():
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    step = prepared(contexts=contexts)
    products = sum(n.target is torch.ops.aten.addmm.default for n in step.computing())
    check(step, HonourCheckpoints())
    assert gelus(step) == 8
    assert products == sum(n.target is torch.ops.aten.addmm.default for n in step.computing())


def test_what_a_policy_keeps_is_not_free_to_run_again():
    def save_gelus(context, operator, *args, **kwargs):
        return (CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.gelu.default
                else CheckpointPolicy.PREFER_RECOMPUTE)

    step = prepared(contexts=functools.partial(create_selective_checkpoint_contexts, save_gelus))
    kept = gelus(step)
    for each in (HonourCheckpoints(), RematerializeFree()):
        each.run(step, no_workspace)
    assert gelus(step) == kept


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE])
def test_what_a_policy_keeps_is_no_choice_of_a_budget(policy):
    """It runs once, and is kept as it is: not even a mask of it in bits."""
    step = prepared(contexts=functools.partial(create_selective_checkpoint_contexts, lambda *given, **named: policy),
                    p=0.3)
    ReplayDropout().run(step)
    found = problem(step, lambda node: 1.0, means=Means(compress="auto"))
    marked = [value for value in found.values if value.needed and value.node.meta.get("recompute") is policy]
    chosen = [value for value in marked if value.packed or found.operations[value.operation].again]
    assert len(marked) >= 12 and bool(chosen) is (policy is CheckpointPolicy.PREFER_SAVE)


@pytest.mark.parametrize("kind", [{"p": 0.3}, {"micro_batches": 2}, {"micro_batches": 4, "p": 0.3}], ids=str)
@pytest.mark.table(4)
def test_trained_as_by_eager(kind):
    """Torch's own rematerialization refuses dropout, and micro-batches, in a checkpoint."""
    kind = {"layers": 2, **kind}
    ways = []
    for compile_it in (lambda step: step, functools.partial(memopt.compile, lowering="eager")):
        torch._dynamo.reset()
        step, args, model = make(**kind)
        run = compile_it(step)
        torch.manual_seed(1)
        ways.append([*(run(*args) for _ in range(6)), *model.parameters()])
    assert memopt.report(run).kind == "step"
    for a, b in zip(*ways):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    plain, args, _ = make(**{**kind, "marked": False})
    free = memopt.explain(plain, *args, lowering="eager").predicted_peak_bytes
    assert memopt.report(run).measured_peak_bytes < free


def test_verified_against_eager():
    """What the graph has of a checkpoint must not draw the dropout's numbers twice there."""
    step, args, _ = make(p=0.3)
    run = memopt.compile(step, lowering="eager", verify=True)
    run(*args)
    assert memopt.report(run).largest_difference < 1e-9


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_batch_is_counted_once_as_by_torch_compile(micro_batches):
    """Eager runs a region twice, and so counts every batch twice in its statistics."""
    statistics = []
    for whole in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
        run = functools.partial(checkpoint, model, use_reentrant=False)
        run = run if whole else torch.compile(run, backend="aot_eager")

        def step(x, y, run=run):
            for inputs, labels in memopt.micro_batches(micro_batches, x, y):
                F.cross_entropy(run(inputs), labels).backward()

        step = memopt.compile(step, lowering="eager") if whole else step
        step(torch.randn(64, 16), torch.randint(4, (64,)))
        statistics.append([*model[1].buffers(), *(p.grad for p in model.parameters())])
    assert memopt.report(step).kind == "step" and statistics[0][2] == micro_batches
    for a, b in zip(*statistics):
        torch.testing.assert_close(a, b)


@pytest.mark.inductor
@pytest.mark.thorough
def test_trained_as_by_eager_on_inductor():
    ways = []
    for compile_it in (lambda step: step, memopt.compile):
        torch._dynamo.reset()
        step, args, model = make(p=0.0, micro_batches=2, layers=2)
        run = compile_it(step)
        ways.append([*(run(*args) for _ in range(3)), *model.parameters()])
    assert memopt.report(run).kind == "step"
    for a, b in zip(*ways):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_peaks_are_predicted():
    step, args, _ = make()
    assert timeline(prepared()).peak_bytes > memopt.explain(
        step, *args, lowering="eager").predicted_peak_bytes
