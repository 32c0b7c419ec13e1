"""What Inductor makes less of than a schedule says, in bytes."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_compile.costs import workspace
from memopt_compile.liveness import timeline
from memopt_compile.step_graph import Phase, StepGraph

SIZE = 16 * 16 * 4


def behind_forward(function, count=3, phase=Phase.BACKWARD):
    step = StepGraph(make_fx(function, tracing_mode="fake")(*[torch.randn(16, 16) for _ in range(count)]), ())
    step.phases = dict.fromkeys(step.computing(), phase)
    return step


def kibibytes(step):
    alone, together = timeline(step), timeline(step, workspace(step, "inductor"))
    return {a.node.name: (a.live_bytes - b.live_bytes) // 1024 for a, b in zip(alone.points, together.points)}


def update(p, g, m):
    new = m * 0.9 + g * 0.1
    m.copy_(new)
    p.copy_(p - new.sqrt() * 0.01)
    return ()


def gelu(x, w, _):
    h = x @ w
    return ((h * 0.5 * (h * 0.7).erf()) @ w,)


def test_an_update_is_one_loop():
    step = behind_forward(update)
    assert timeline(step).transient_peak_bytes == 3 * SIZE
    assert timeline(step, workspace(step, "inductor")).transient_peak_bytes == 0
    assert timeline(step, workspace(step, "eager")).transient_peak_bytes == 3 * SIZE


def test_forward_is_as_backward():
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert kibibytes(behind_forward(gelu, phase=phase)) == {"mm": 0, "mul": 1, "mul_1": 2, "erf": 2, "mul_2": 2, "mm_1": 0}


def test_what_forward_makes_and_backward_reads_is_made():
    step = behind_forward(gelu, phase=Phase.FORWARD)
    step.phases[list(step.computing())[-1]] = Phase.BACKWARD
    assert kibibytes(step)["mul_2"] == 2
    erf = next(n for n in step.computing() if n.name == "erf")
    with step.graph.inserting_before(step.graph.output_node()):
        step.phases[step.call(erf, torch.ops.aten.neg.default, erf)] = Phase.BACKWARD
    assert kibibytes(step)["erf"] == 1


def test_a_sum_takes_the_place_of_what_it_adds_to():
    step = behind_forward(lambda x, w, b: ((x @ w + b @ w) @ w,))
    assert kibibytes(step) == {"mm": 0, "mm_1": 0, "add": 1, "mm_2": 0}


def test_what_a_product_reads_is_made():
    step = behind_forward(lambda x, w, b: (x.sin() @ w,))
    assert kibibytes(step) == {"sin": 0, "mm": 0}


def test_an_operand_waits_for_the_loop_that_reads_it():
    step = behind_forward(lambda x, w, b: ((x @ w).double().mul(b.double()).float() @ w,), 3)
    # Both doubles, 2 KiB each, and their product are never made; the first product of matrices is there until their last.
    assert kibibytes(step) == {"mm": 0, "_to_copy": 2, "_to_copy_1": 4 - 1, "mul": 6 - 1, "_to_copy_2": 2, "mm_1": 0}
