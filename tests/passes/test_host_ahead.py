"""What the host computes of its own numbers goes ahead of the step. Devices are fake here; `test_replaying` has real ones."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_compile.backends import eager
from memopt_compile.compat.dry_run import FakeTensorMode
from memopt_compile.errors import CaptureError
from memopt_compile.lowering.ahead import PROGRAMS, Ahead, same_values
from memopt_compile.passes.host_ahead import HostAhead
from memopt_compile.pipelines import run
from memopt_compile.step_graph import Input, Phase, Role, StepGraph

pytestmark = pytest.mark.usefixtures("nothing_recorded")
WEIGHT, COUNT, RATE = (Role.PARAMETER, "cuda", (4,)), (Role.STATE, "cpu", ()), (Role.NUMBER, "cpu", ())


@pytest.fixture(scope="module")
def nothing_recorded():
    """Without CUDA, PyTorch cannot be asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield


def step_of(function, *inputs, written=(), dtype=torch.float32):
    """`function` of fake inputs, each (role, device, shape) and perhaps a dtype of its own. Its last results are new
    values of the inputs at `written`: no fake device copies."""
    with FakeTensorMode():
        values = [torch.empty(shape, device=device, dtype=own[0] if own else dtype) for _, device, shape, *own in inputs]
        module = make_fx(function)(*values)
    graph, output = module.graph, module.graph.output_node()
    given, made = graph.find_nodes(op="placeholder"), list(output.args[0])
    results, new = made[:len(made) - len(written)], made[len(made) - len(written):]
    with graph.inserting_before(output):
        for i, value in zip(written, new):
            graph.call_function(torch.ops.aten.copy_.default, (given[i], value)).meta["val"] = given[i].meta["val"]
    output.args = (tuple(results),)
    step = StepGraph(module, tuple(Input(n.name, role, n.name, 4) for n, (role, *_) in zip(given, inputs)))
    step.phases = dict.fromkeys(step.computing(), Phase.UPDATE)
    return step


def update(w, n, rate):
    """A parameter's update by a count of steps and a rate."""
    counted = n + 1
    change = w * (rate / (1 - 0.9 ** counted))
    return change.sum(), w - change, counted


def test_golden():
    step = step_of(update, WEIGHT, COUNT, RATE, written=(0, 1))
    record = run(step, [HostAhead()])[0]
    assert record.refusal is None and record.peak_after <= record.peak_before
    assert (
        step.text()
        == """\
p0: f32[4]  # parameter
s0: f32[]  # state
n0: f32[]  # number
n1: f32[]  # number
update:
  mul_0: f32[4] = mul(p0, n1)
  sum_0: f32[] = sum(mul_0)
  sub_0: f32[4] = sub(p0, mul_0)
  copy_0: f32[4] = copy_(p0, sub_0)
ahead, on the host:
  h0: f32[] = add(s0, 1)
  h1: f32[] = pow.Scalar(0.9, h0)
  h2: f32[] = rsub.Scalar(h1, 1)
  h3: f32[] = div(n0, h2)
  n1 <- h3
  s0 <- h0
return sum_0
"""
    )


@pytest.mark.parametrize(("function", "inputs", "reason"), [
    (lambda w, x: (w * x,), (WEIGHT, (Role.BATCH, "cuda", (4,))), "needs no number of the host's"),
    (lambda w, x: (torch.ops.aten.index.Tensor(w, [x]),), (WEIGHT, (Role.BATCH, "cpu", (4,), torch.int64)), "reads more than numbers"),
    (lambda w, n: (w * n, n + 1), (WEIGHT, COUNT), "a result is made on the host"),
    (lambda w, n: (w * n, torch.ops.memopt.to_host(w)), (WEIGHT, COUNT), "to_host.* needs the host"),
    (lambda w, n: (w * n * torch.rand(()),), (WEIGHT, COUNT), "draws on the host"),
    (lambda w, n: (w * torch.ops.aten.add_.Tensor(n, 1),), (WEIGHT, COUNT), "does more with its numbers than arithmetic"),
], ids=["nothing", "batch", "result", "read", "drawn", "written"])
def test_nothing_goes_ahead(function, inputs, reason):
    step = step_of(function, *inputs)
    text = step.text()
    assert re.search(reason, run(step, [HostAhead()])[0].refusal)
    assert step.text() == text and step.ahead is None


@pytest.mark.parametrize(("rounds", "dtype", "stays"), [
    (True, torch.bfloat16, True), (True, torch.float32, False), (False, torch.bfloat16, False)])
def test_no_number_is_rounded_that_was_not(rounds, dtype, stays):
    step = step_of(update, (*WEIGHT, dtype), COUNT, RATE, written=(0, 1))
    assert ("rounded" in (HostAhead(rounds=rounds).requires(step) or "")) is stays


def test_whole_quotients_stay_where_the_kernel_has_them():
    step = step_of(lambda w, n: (torch.div(w, n, rounding_mode="floor"),), WEIGHT, COUNT)
    assert "rounded to a whole number" in HostAhead(rounds=True).requires(step)
    assert HostAhead(rounds=False).requires(step) is None


def test_the_kernel_multiplies_for_a_quotient_by_a_number_of_the_hosts():
    """Inductor's divides."""
    texts = []
    for rounds in (True, False):
        step = step_of(lambda w, n: (w / n,), WEIGHT, (*COUNT, torch.float64))
        run(step, [HostAhead(rounds=rounds)])
        texts.append(step.text().partition("update:")[2])
    assert texts[0] == """
  mul_0: f32[4] = mul(p0, n0)
ahead, on the host:
  h0: f32[] = _to_copy(s0, dtype=torch.float32)
  h1: f32[] = reciprocal(h0)
  n0 <- h1
return mul_0
"""
    assert "div_0: f32[4] = div(p0, n0)" in texts[1]


def many(count):
    """A step of `count` parameters, each with a count of its own, as PyTorch's optimizers have it."""
    def step(*inputs):
        *pairs, rate = inputs
        sums, *new = zip(*(update(w, n, rate) for w, n in zip(pairs[::2], pairs[1::2])))
        return sum(sums), *(v for pair in zip(*new) for v in pair)

    return step_of(step, *[WEIGHT, COUNT] * count, RATE, written=range(2 * count), dtype=torch.float64)


def on_this_device(step):
    """The numbers of the device in the host's memory, where no other is there."""
    for i in step.ahead.numbers:
        step.placeholders[i].meta["val"] = torch.empty((), dtype=step.placeholders[i].meta["val"].dtype)
    return Ahead(eager.lower(step), step, "train.py:3")


WHOLE, SPLIT = many(3), many(3)
run(SPLIT, [HostAhead()])
AHEAD = on_this_device(SPLIT)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 7.0, float("inf"), float("nan")]), min_size=3, max_size=3),
       st.sampled_from([0.1, 0.0, -0.0]))
def test_numbers_are_the_same_whatever_counts_are_equal(counts, rate):
    def values():
        pairs = [v for c in counts for v in (torch.linspace(0, 1, 4).double(), torch.tensor(c).double())]
        return [*pairs, torch.tensor(rate).double()]

    expected, got = values(), values()
    for _ in range(2):
        results = [eager.lower(WHOLE)(list(expected))[0], AHEAD(list(got))[0]]
        for a, b in zip([results[0], *expected], [results[1], *got]):
            assert torch.equal(a.view(torch.int64), b.view(torch.int64)) or a.isnan().any() and torch.equal(a.isnan(), b.isnan())
    assert len(AHEAD.programs) <= PROGRAMS


def test_equal_counts_are_computed_once():
    host = [torch.tensor(v) for v in (1.0, 1.0, 2.0, 0.0, -0.0, 1, 0, 0)]
    assert same_values(host, [[0, 1, 2, 3, 4], [5, 6, 7]]) == (0, 0, 2, 3, 4, 5, 6, 6)
    AHEAD([v for _ in range(3) for v in (torch.ones(4).double(), torch.ones(()).double())] + [torch.ones(()).double()])
    program = AHEAD.programs[0, 0, 0, 0]
    assert len([n for n in program.module.graph.nodes if n.op == "call_function"]) == 4


def test_a_step_that_fails_has_not_been_counted():
    def fails(inputs):
        raise MemoryError

    count = torch.zeros((), dtype=torch.float64)
    given = [v for _ in range(3) for v in (torch.ones(4).double(), count)] + [count]
    with pytest.raises(MemoryError):
        Ahead(fails, SPLIT, "train.py:3")(given)
    assert count == 0


def test_a_recording_of_the_callers_own_has_rates_and_may_not_count(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="train.py:3"):
        AHEAD([])
    step = step_of(lambda w, rate: (w * (1 - rate),), WEIGHT, RATE)
    run(step, [HostAhead()])
    assert torch.equal(on_this_device(step)([torch.ones(4), torch.tensor(0.25)])[0], torch.full((4,), 0.75))
