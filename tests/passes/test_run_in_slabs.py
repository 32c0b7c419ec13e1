"""Runs of elementwise operators hold slabs, and give the same bits."""

from dataclasses import replace

import pytest
import torch
from graphs import (
    by_hand,
    captured,
    check,
    gradient,
    mlp,
    ordinary_step,
    seed,
    training_step,
    values_for,
)
from torch import nn

import memopt_compile as memopt
from memopt_compile.backends import eager
from memopt_compile.costs import workspace
from memopt_compile.in_slabs import IN_SLABS_, in_slabs_
from memopt_compile.liveness import timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.reuse_buffers import ReuseBuffers
from memopt_compile.passes.run_in_slabs import RunInSlabs
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.step_graph import Phase

STORY = Canonicalize(), ReleaseGradients(), ScheduleForPeak(), ReuseBuffers()
SMALL = RunInSlabs(at_least=256, length=64)
aten = torch.ops.aten


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def update(p, m, v, g, n):
    m.lerp_(g, 0.1)
    v.mul_(0.9).addcmul_(g, g, value=0.1)
    p.addcdiv_(m, v.sqrt().div_(n).add_(1e-8), value=-0.1)
    return ()


UPDATED = ("p", doubles(16, 20)), ("s", doubles(16, 20)), ("s", doubles(16, 20)), ("x", doubles(16, 20))


def test_golden():
    step = by_hand(update, *UPDATED, ("n", doubles()))
    before, after = check(step, SMALL)
    assert before == 16 * 20 * 8 and after == 0
    assert step.text() == """\
p0: f64[16, 20]  # parameter trained
s0: f64[16, 20]  # state
s1: f64[16, 20]  # state
x0: f64[16, 20]  # batch
n0: f64[]  # number
forward:
  lerp_0: f64[16, 20] = lerp_.Scalar(s0, x0, 0.1)
  mul_0: f64[16, 20] = mul_(s1, 0.9)
  addcmul_0: f64[16, 20] = addcmul_(mul_0, x0, x0, value=0.1)
  in_slabs_0: NoneType = in_slabs_([p0], [addcmul_0, lerp_0], [n0], t0 = aten.sqrt.default(a1); \
aten.div_.Tensor(t0, n0); aten.add_.Tensor(t0, 1e-08); aten.addcdiv_.default(a0, a2, t0, value=-0.1); del t0, 64)
return 
"""


def test_what_is_read_outside_has_a_storage_or_a_mark():
    def step(p, x):
        moved = (x.exp() + 1).reshape(-1)
        p.mul_(moved.sin().view(16, 20))
        return moved * 2, p.sum()

    step = by_hand(step, ("p", doubles(16, 20)), ("x", doubles(16, 20)))
    before, after = check(step, SMALL)
    assert after < before
    assert step.text().partition("forward:\n")[2] == """\
  new_empty_strided_0: f64[320] = new_empty_strided(x0, [320], [1], dtype=torch.float64)
  in_slabs_0: NoneType = in_slabs_([p0, new_empty_strided_0], [x0], [], t0 = aten.exp.default(a2); \
t1 = aten.add.Tensor(t0, 1); del t0; t2 = aten.sin.default(t1); aten.mul_.Tensor(a0, t2); del t2; \
a1.copy_(aten.mul.Tensor(t1, 2)); del t1, 64)
  copy_0: f64[16, 20] = copy_(p0, p0)
  copy_1: f64[320] = copy_(new_empty_strided_0, new_empty_strided_0)
  sum_0: f64[] = sum(copy_0)
return copy_1, sum_0
"""


def chain(x, y, place):
    """Kernels with vectors and without, other types, whole numbers, views."""
    wide = x.float() * 1.5
    flat = torch.tanh(wide).mul_(y.float()).lerp_(wide, 0.3)
    bits = flat.view(torch.int32) + place
    flat = torch.where(flat > 0.1, flat, 1.0 / (bits.view(torch.float32).abs() + 2)).exp().addcdiv_(wide, wide + 3)
    x.copy_(flat)
    y.add_(flat.rsqrt())
    return ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [256, 257, 64 * 5 - 1, 64 * 5 + 31, 1999, 4096 * 5 + 7])
def test_bit_by_bit(count, dtype):
    values = [("s", torch.rand(count).to(dtype)), ("s", torch.rand(count).to(dtype)),
              ("x", torch.randint(3, (), dtype=torch.int32))]
    before, after = check(by_hand(chain, *values), SMALL)
    assert after == 0 < before


def layouts():
    yield torch.rand(3, 5, 7, 9)
    yield torch.rand(3, 5, 7, 9).to(memory_format=torch.channels_last)
    yield torch.rand(19, 23).t()
    yield torch.rand(1, 19, 23).permute(2, 0, 1)


@pytest.mark.parametrize("like", [*layouts()], ids=lambda t: str(t.stride()))
def test_any_layout_without_gaps(like):
    def step(p, x):
        p.add_((x * 2).exp().sub_(x))
        return ()

    before, after = check(by_hand(step, ("p", torch.rand_like(like)), ("x", torch.rand_like(like))), SMALL)
    assert after == 0 < before


def another_order(p, x):
    p.add_(x.t() * 2)
    return ()


def rows(p, x):
    p.mul_((x * 2).div_(x.mean(1, keepdim=True)))
    return ()


def norm_between(p, x):
    moved = x * 2
    p.mul_(moved.div_(moved.norm()))
    return ()


def random(p, x):
    p.mul_(torch.rand_like(x))
    return ()


def returned(p, x):
    return x * 2


def small(p, x):
    p[:4].add_(x[:4].exp() * 2)
    return ()


def a_part(p, x):
    """What is written later in the same storage is read: its elements do not stay together."""
    p[:19].add_(p[1:].exp() * 2)
    return ()


def finished_gradient(p, x):
    loss = (p * x).sum()
    p.sub_(gradient(seed(loss) * x))
    return ()


@pytest.mark.parametrize("step", [rows, norm_between, random, returned, small, a_part, finished_gradient, another_order])
def test_nothing_to_do(step):
    step = by_hand(step, ("p", doubles(20, 20)[:16] if step is small else doubles(20, 20)), ("x", doubles(20, 20)))
    text = step.text()
    check(step, SMALL)
    assert step.text() == text


def test_sizes_that_are_symbols():
    model = nn.Linear(32, 32)

    def forward_only(x):
        loss = (model(x) * 2).tanh().exp().sum()
        loss.backward()
        return loss.detach()

    torch._dynamo.mark_dynamic(x := torch.randn(64, 32), 0)
    step = captured(forward_only, x)
    SMALL.run(step)
    assert IN_SLABS_ not in {n.target for n in step.computing()}


def test_left_as_it_was_where_the_peak_would_rise():
    def step(a, b, w):
        first, second = torch.mm(a, b), torch.mm(b, a)
        temporary = first + second
        wide = torch.mm(w, w.t()).sum()
        return (temporary * wide).exp().sum()

    # Over the widest moment one array is held, and with a region there would be two.
    step = by_hand(step, ("x", doubles(16, 16)), ("x", doubles(16, 16)), ("x", doubles(99, 9)))
    text = step.text()
    check(step, SMALL)
    assert step.text() == text


def test_what_is_between_is_of_the_region():
    def step(p, m, v, n):
        root = v.sqrt()
        p.addcdiv_(m, root)
        m.mul_(p)
        p.addcdiv_(m, root.add_(n))
        return ()

    step = by_hand(step, *UPDATED[:3], ("n", doubles()))
    check(step, SMALL)
    assert step.op_counts() == {"in_slabs_": 1}


def test_depends_on_a_norm_of_what_it_writes():
    def step(p, m, v):
        root = v.sqrt()
        p.addcdiv_(m, root)
        p.mul_(root.mul_(p.norm()))
        return ()

    step = by_hand(step, *UPDATED[:3])
    text = step.text()
    check(step, SMALL)
    assert step.text() == text


class Bell(nn.Module):
    def forward(self, x):
        return torch.exp(-(x * 3).cos().sin().cos() / 7)


def test_of_updates_alone():
    """What forward and backward are made of other passes still have to see; and a plan has its operators' names."""
    of_all, of_updates = (training_step(nn.Sequential(nn.Linear(32, 32), Bell(), nn.Linear(32, 4)).double(), batch=16,
                                        optimizer=torch.optim.AdamW) for _ in range(2))
    found = {}
    for step, each in ((of_all, SMALL), (of_updates, replace(SMALL, of_updates=True))):
        Canonicalize().run(step)
        check(step, each)
        found[each] = {step.phase(n) for n in step.computing() if n.target is IN_SLABS_}
    assert list(found.values()) == [{Phase.BACKWARD, Phase.UPDATE}, {Phase.UPDATE}]
    of_updates.plan = object()
    assert "plan" in replace(SMALL, unplanned=True).requires(of_updates) and SMALL.requires(of_updates) is None


SETTINGS = [{"optimizer": o, **settings} for o, settings in (
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"clip": 0.1}),
    (torch.optim.AdamW, {"micro_batches": 3}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "keep_gradients": True}),
    (torch.optim.NAdam, {}), (torch.optim.RAdam, {}), (torch.optim.Adadelta, {}), (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}), (torch.optim.Adamax, {}), (torch.optim.ASGD, {}),
    (memopt.optim.AdamW, {"state_bits": 16}), (memopt.optim.CAME, {"state_bits": 16}),
    (memopt.optim.AdamW, {"weight_bits": 24}))]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(
    str(getattr(v, "__name__", f"{k}={v}")) for k, v in s.items()))
@pytest.mark.table(6)
def test_optimizers(settings):
    model = mlp(3)
    if "weight_bits" in settings:
        opt = settings["optimizer"](model.bfloat16().parameters(), weight_bits=24)
        step = captured(ordinary_step(model, opt), torch.randn(4, 32).bfloat16(), torch.zeros(4, dtype=torch.int64))
    else:
        step = training_step(model, **settings)
    check(step, *STORY)
    check(step, SMALL)
    assert step.op_counts()["in_slabs_"] >= 3  # of each layer, and bits are those of eager
    assert not any(n.target is aten.sqrt.default and n.meta["val"].numel() > 256 for n in step.computing())


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p), lambda p: torch.optim.RMSprop(p, momentum=0.9), lambda p: torch.optim.Adadelta(p),
    lambda p: memopt.optim.AdamW(p, state_bits=16)], ids=["AdamW", "RMSprop", "Adadelta", "16 bits"])
def test_predicted_and_measured(make):
    """A large layer's update holds its gradient and slabs, whatever the size."""
    def beside_gradient(rows):
        torch._dynamo.reset()
        layer = nn.Linear(1024, rows, bias=False)
        opt = make(layer.parameters())

        def step(x):
            layer(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        compiled, x = torch.compile(step, backend="memopt", options={"lowering": "eager"}), torch.randn(1, 1024)
        compiled(x)
        report = memopt.report(compiled)
        assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 16
        held = memopt.measure(compiled, x, resident=(layer, opt, x)).transient_peak_bytes
        return held - layer.weight.nbytes

    few, many = beside_gradient(1024), beside_gradient(2048)
    assert few < 2**21 and many - few <= 2 * 1024 * 4  # activations, 4 bytes for each row


def test_holds_as_much_as_measured():
    step = by_hand(update, *UPDATED, ("n", doubles()))
    SMALL.run(step)
    values = values_for(step)
    run = eager.lower(step)
    seen = memopt.measure(lambda: run(list(values)), resident=()).transient_peak_bytes
    assert 64 * 8 <= timeline(step, workspace(step)).transient_peak_bytes == seen < 65 * 8 + 8


def test_one_that_repeats_a_single_number():
    p, x = torch.zeros(200), torch.rand(())
    in_slabs_([p], [x.expand(200)], [], "a0.add_(a1)", 64)
    assert p.tolist() == [x.item()] * 200
