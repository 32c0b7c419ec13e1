"""How a step is cut where a second backward begins, and how convolutions lie: with Inductor's own ways a program may hold more than eager."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import memopt_compile as memopt
from memopt_compile.backends import inductor
from memopt_compile.compat import inductor as compat_inductor
from memopt_compile.lowering import pieces
from memopt_compile.step_graph import Phase, StepGraph

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler"),
]


def peak_of_two_backwards() -> int:
    """Of a micro-batch and a shorter one, whose normalizations' gradients are sums over the rows."""
    torch.manual_seed(0)
    widths = (16, 64, 64)
    model = nn.Sequential(*[layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.GELU())],
                          nn.Linear(64, 4)).double().eval()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(*batches: Tensor) -> None:
        for x in batches:
            model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()

    inductor.forget()
    return memopt.explain(step, *(torch.randn(n, 16, dtype=torch.float64) for n in (256, 255))).predicted_peak_bytes


def test_the_next_backward_begins_a_piece(monkeypatch):
    """Of one piece Inductor adds up the sums of both backwards in one loop, over the activations of both."""
    apart = peak_of_two_backwards()
    monkeypatch.setattr(pieces, "_borders", lambda *given: [])
    assert apart < 0.8 * peak_of_two_backwards()


@pytest.mark.parametrize("order, cuts", [
    ("f b 1 b 1 b 2 2", [5]),  # a forward that both go through
    ("f b 1 b 1 b 2 1 2", [5]),  # put off
    ("f b 1 b 2 b 1 2 1 1", []),  # layer by layer
    ("f b 1 f b 2 2 f f b 3", [3, 7]),
    ("f b 1 1", []),
])
def test_where_a_backward_is_over(order, cuts):
    values = make_fx(lambda x: [x := x.cos() for _ in order.split()], tracing_mode="fake")(torch.randn(4))
    nodes = values.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    step = StepGraph(values, (), phases={n: Phase.FORWARD if kind == "f" else Phase.BACKWARD for n, kind in zip(nodes, order.split())},
                     gradients={n: int(kind) for n, kind in zip(nodes, order.split()) if kind.isdigit()})
    assert pieces._borders(step, nodes) == cuts


def convolutions(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
    for weight in weights:
        x = F.conv2d(x, weight, padding=1).relu()
    return (x.clone(),)


def given_to(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype) / 8 for size in ((1, 64, 4, 4), *((64, 64, 3, 3),) * 3)]


def convolving(dtype: torch.dtype) -> StepGraph:
    return StepGraph(make_fx(convolutions, decomposition_table=inductor.decompositions(), tracing_mode="fake")(*given_to(dtype)), ())


def test_convolutions_lie_as_traced_where_that_needs_less():
    """Inductor copies the weights to channels-last, all of them at once, which are more here than the images."""
    inductor.forget()
    plain, aimed = (inductor.lower(convolving(torch.float32), aim=aim) for aim in (math.inf, 0))
    assert aimed.transient_peak_bytes() < 0.5 * plain.transient_peak_bytes()
    for lowered in (plain, aimed):
        torch.testing.assert_close(lowered(given_to(torch.float32))[0], convolutions(*given_to(torch.float32))[0])
    limit = aimed.transient_peak_bytes()
    assert inductor.lower(convolving(torch.float32), within=limit, later=True).transient_peak_bytes() == limit


def test_in_float64_nothing_is_copied_for_onednn():
    given = given_to(torch.float64)
    assert not compat_inductor.turns_layouts(convolving(torch.float64).graph)
    assert torch.equal(inductor.lower(convolving(torch.float64))(list(given))[0], convolutions(*given)[0])
