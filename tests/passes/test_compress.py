import dataclasses
import functools
import math
import re

import pytest
import torch
from graphs import (
    by_hand,
    captured,
    check,
    gradient,
    outcome,
    seed,
    training_step,
    two_layers,
    values_for,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_compile.backends import eager, inductor
from memopt_compile.compat import inductor as compat_inductor
from memopt_compile.compression import layout, whole_parts, whole_value
from memopt_compile.liveness import timeline
from memopt_compile.memory_plan import MemoryPlan
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.compress import Compress
from memopt_compile.passes.plan_memory import PlanMemory
from memopt_compile.passes.recompute import Recompute
from memopt_compile.passes.reuse_buffers import ReuseBuffers
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.planning.packing import candidates
from memopt_compile.planning.rematerialization import Means
from memopt_compile.planning.sensitivity import Sensitivity, Use, sensitivity
from memopt_compile.quantization.activations import Packing
from memopt_compile.quantization.named import FORMATS
from memopt_compile.step_graph import Phase

CPU = torch.device("cpu")


def plan(*packed, again=()):
    return MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(again), packed)


def test_golden():
    step = two_layers()
    step.plan = plan(("tanh", "int8"))
    Compress().run(step)
    step.verify()
    assert step.text() == """\
p0: f64[4, 4]  # parameter trained
p1: f64[4, 4]  # parameter trained
x0: f64[8, 4]  # batch
forward:
  mm_0: f64[8, 4] = mm(x0, p0)
  tanh_0: f64[8, 4] = tanh(mm_0)
  mm_1: f64[8, 4] = mm(tanh_0, p1)
  compress_0: 2 values = compress(tanh_0, int8)
  getitem_0: i8[1, 2, 64] = getitem(compress_0, 0)
  getitem_1: f32[1, 1, 1] = getitem(compress_0, 1)
  sum_0: f64[] = sum(mm_1)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  expand_0: f64[8, 4] = expand(full_0, [8, 4])
  decompress_0: f64[8, 4] = decompress([getitem_0, getitem_1], int8, [8, 4], [4, 1], torch.float64)
  t_0: f64[4, 8] = t(decompress_0)
  mm_2: f64[4, 4] = mm(t_0, expand_0)
  t_1: f64[4, 8] = t(x0)
  t_2: f64[4, 4] = t(p1)
  mm_3: f64[8, 4] = mm(expand_0, t_2)
  cos_0: f64[8, 4] = cos(mm_0)
  mul_0: f64[8, 4] = mul(mm_3, cos_0)
  mm_4: f64[4, 4] = mm(t_1, mul_0)
return sum_0, mm_2, mm_4
"""


def test_nothing_to_do():
    step = two_layers()
    assert "nothing is to be compressed" in Compress().requires(step)
    step.plan = plan(again=["mm"])
    assert "nothing is to be compressed" in Compress().requires(step)


def test_what_runs_again_reads_the_unpacked_value():
    step = two_layers()
    step.plan = plan(("mm", "int8"), again=["tanh"])
    Recompute().run(step)
    Compress().run(step)
    step.verify()
    decoded, = (n for n in step.computing() if "decompress" in str(n.target))
    assert {u.target.__name__.split(".")[0] for u in decoded.users} == {"tanh", "cos"}


def stack(*layers, batch=64, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Linear(32, 4)).double()
    step = training_step(model, torch.optim.SGD, batch=batch, **settings)
    for each in (Canonicalize(), ScheduleForPeak()):
        each.run(step)
    return step


def planned(step, share, again=False, compress=None):
    peak = timeline(step)
    beyond = peak.peak_bytes - peak.resident_bytes
    twin = step.copy()
    PlanMemory(peak.resident_bytes + int(share * beyond), CPU, Means(again, compress)).run(twin)
    for each in (Recompute(), Compress()):
        if each.requires(twin) is None:
            each.run(twin)
            twin.verify()
    return twin


def formats(step):
    return {form for _, form in step.plan.packed} if step.plan else set()


def blocks(*kinds):
    return [make() for _ in range(4) for make in (lambda: nn.Linear(32, 32), *kinds)]


def test_masks_take_a_bit_and_lose_nothing():
    step = stack(*blocks(lambda: nn.Dropout(0.3)), batch=256)
    twin = planned(step, 0.93)
    assert formats(twin) == {"1-bit mask"}
    assert timeline(twin).peak_bytes < timeline(step).peak_bytes
    values = values_for(step)
    for a, b in zip(outcome(eager.lower(step), values), outcome(eager.lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


class Gated(nn.Module):
    """Nobody but the backward of relu reads its result again."""

    def forward(self, x):
        return x + torch.relu(x)


def test_signs_take_a_bit_and_lose_nothing():
    step = stack(*blocks(Gated), batch=256)
    twin = planned(step, 0.9)
    assert formats(twin) == {"1-bit sign"}
    values = values_for(step)
    for a, b in zip(outcome(eager.lower(step), values), outcome(eager.lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_places_of_maxima_take_a_byte():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    step = captured(train, torch.randn(8, 1, 16, 16))
    Canonicalize().run(step)
    found = sensitivity(step, None)
    (places, form), = ((n, f) for n, f in found.formats.items() if f)
    assert form == ("uint8 index",)
    twin = step.copy()
    twin.plan = plan((places.name, "uint8 index"))
    check(twin, Compress())
    values = values_for(step)
    for a, b in zip(outcome(eager.lower(step), values), outcome(eager.lower(twin), values)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize(("compress", "bound"), [("int8", 0.02), ("int4", 0.25), ("auto", 0.02)])
def test_lossy_formats_keep_gradients_near(compress, bound):
    step = stack(*blocks(nn.GELU), batch=512)
    twin = planned(step, 0.75, compress=compress)
    assert timeline(twin).peak_bytes < timeline(step).peak_bytes
    assert formats(twin) and all(f.startswith(("int8", "int4")) for f in formats(twin))
    values = values_for(step)
    moved = [torch.cat([(after - before).flatten() for after, before, given in zip(
        outcome(eager.lower(s), values)[-len(values):], values, step.inputs) if given.trained])
        for s in (step, twin)]
    assert 0 < (moved[0] - moved[1]).norm() <= bound * moved[0].norm()


def test_inductor_computes_what_the_operators_do():
    step = stack(*blocks(nn.GELU, lambda: nn.LayerNorm(32)), batch=512, lowering="inductor")
    twin = planned(step, 0.7, compress="int4")
    assert {"int4 outliers"} <= formats(twin)
    values = values_for(step)
    expected, got = (outcome(run, values) for run in (eager.lower(twin), inductor.lower(twin)))
    for a, b in zip(expected, got):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-9, atol=1e-9)


def lowered(function, *given):
    """How many loop nests Inductor makes of it, and the buffers that have the bytes of 512 x 64 numbers of float32."""
    module = make_fx(function, compat_inductor.decompositions(), tracing_mode="fake")(*given)
    with compat_inductor.Kernels().put_off(begin=False):
        _, source = compat_inductor.compile_graph(module)
    shapes = re.findall(r"= empty_strided_cpu\(\(([0-9, ]+)\), .*torch.float32\)", source)
    sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]
    return len(re.findall(r"^ +cpp_fused\w*\(", source, re.MULTILINE)), sum(size >= 512 * 64 for size in sizes)


@pytest.mark.inductor
@pytest.mark.parametrize("form", [f for f, each in FORMATS.items() if isinstance(each, Packing) and each.error])
def test_a_loop_nest_each_on_inductor(form):
    """The value is never written a second time; for outliers, sums come first and PyTorch picks the largest."""
    value = torch.randn(512, 64)
    assert lowered(lambda x: whole_parts(x, form), value) == (2 if form == "int4 outliers" else 1, 0)
    parts = whole_parts(value, form)
    assert lowered(lambda *parts: [whole_value(parts, form, *layout(value))], *parts) == (1, 1)


def test_formats_follow_from_the_graph():
    """By what reads a value: products and sums tolerate, decisions and exponents do not."""
    def layer(p, x):
        hidden = torch.mm(x, p)
        largest = hidden.amax(-1, keepdim=True)
        weights = torch.softmax(hidden, -1)
        chosen = hidden > 0
        loss = (weights * chosen).sum() + largest.sum()
        upstream = torch.ops.aten.expand(seed(loss), (256, 64))
        scores = torch.exp(hidden - largest) * upstream
        of_hidden = torch.ops.aten._softmax_backward_data(upstream * chosen, weights, -1, torch.float64)
        return loss, gradient(torch.mm(x.t(), of_hidden + scores))

    step = by_hand(layer, ("p", torch.rand(64, 64, dtype=torch.float64)),
                   ("x", torch.rand(256, 64, dtype=torch.float64)))
    Canonicalize().run(step)
    named = {n.target.__name__.split(".")[0]: n for n in step.computing()
             if step.phase(n) is Phase.FORWARD}
    found = sensitivity(step, "auto")
    assert found.use[named["mm"]] is Use.EXACT and found.formats[named["mm"]] == ()
    assert found.use[named["amax"]] is Use.EXACT
    assert found.formats[named["_softmax"]] == ("int8", "int4 offset")
    assert found.formats[named["gt"]] == ("1-bit mask",)
    assert sensitivity(step, None).formats[named["_softmax"]] == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("form", "rows", "taken"), [
    ("int4 outliers", 256, "int4 outliers"), ("int4 outliers", 2, "int4"), ("int4 channels", 256, "int4 channels"),
    ("int4 channels", 130, "int4"), ("int4 offset", 2, "int4 offset")])
def test_four_bits_are_at_most_0_3_of_the_bytes(form, rows, taken, dtype):
    """Places of outlier columns, and groups of a column's rows that are not full, are more where rows are few."""
    node = torch.fx.Graph().placeholder("hidden")
    node.meta["val"] = torch.empty(rows, 1100, dtype=dtype, device="meta")
    found = candidates(Sensitivity(formats={node: (form,)}), lambda node: 0.0)
    ((packed,),) = found.values()
    assert packed.nbytes <= 0.3 * node.meta["val"].nbytes
    small = (form, dtype) == ("int4 outliers", torch.float32) or (form, rows, dtype) == ("int4 channels", 130, torch.float32)
    assert packed.form == (form if small else taken)


def test_statistics_of_a_normalization_that_is_taken_apart_stay_exact():
    """A mean in 4 bits, of rows that are far from 0, would move their gradients by more than their size."""
    step = stack(*blocks(nn.GELU, lambda: nn.LayerNorm(32)), batch=512, lowering="inductor")
    found = sensitivity(step, "int4")
    statistics = [n for n in found.formats if n.meta["val"].shape == (512, 1)]
    assert len(statistics) >= 4 and all(found.use[n] is Use.FOLLOWS and not found.formats[n] for n in statistics)
    assert any(forms == ("int4 outliers",) for forms in found.formats.values())


def test_what_a_metric_reads_behind_backward_stays_exact():
    def layer(p, q, x, metric):
        hidden = torch.mm(x, p)
        loss = torch.mm(hidden, q).sum()
        upstream = torch.ops.aten.expand(seed(loss), (256, 64))
        of_q = gradient(torch.mm(hidden.t(), upstream))
        seen = (torch.mm(hidden.t(), upstream * 2),) if metric else ()
        of_p = gradient(torch.mm(x.t(), torch.mm(upstream, q.t())))
        return loss, of_q, of_p, *seen

    for metric, expected in ((True, ()), (False, ("int8", "int4 outliers"))):
        step = by_hand(functools.partial(layer, metric=metric),
                       *((role, torch.rand(shape, dtype=torch.float64)) for role, shape in (
                           ("p", (64, 64)), ("p", (64, 64)), ("x", (256, 64)))))
        Canonicalize().run(step)
        hidden = next(n for n in step.computing() if n.target is torch.ops.aten.mm.default)
        assert sensitivity(step, "auto").formats[hidden] == expected


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh])
def test_formats_do_not_depend_on_where_backward_writes(activation):
    step = stack(*blocks(activation, lambda: nn.LayerNorm(32)), batch=512)
    found = {node.name: (found.use[node], forms) for found in (sensitivity(step, "auto"),) for node, forms in found.formats.items()}
    before = step.op_counts()
    ReuseBuffers(of_backward=True).run(step)
    now = sensitivity(step, "auto")
    assert step.op_counts() != before and {node.name: (now.use[node], forms) for node, forms in now.formats.items()} == found
    assert sum(any("int4" in form for form in forms) for _, forms in found.values()) >= 4


def test_pass_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Compress().name = "other"
