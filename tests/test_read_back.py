"""What is read from where it is written: which readers, the numbers, and the bytes on Inductor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_compile.backends import inductor
from memopt_compile.lowering.read_back import read_back
from memopt_compile.step_graph import StepGraph


def update(gradient: Tensor, parameter: Tensor, moment: Tensor) -> tuple[Tensor, ...]:
    new = 0.9 * moment + gradient
    moment.copy_(new)
    parameter.copy_(parameter - 0.1 * new)
    return (new,)


def twice(gradient: Tensor, parameter: Tensor, moment: Tensor) -> tuple[Tensor, ...]:
    new = 0.9 * moment + gradient
    moment.copy_(new)
    parameter.copy_(parameter - new)
    moment.copy_(parameter * 2)
    return (new * 3,)


def rounded(gradient: Tensor, parameter: Tensor, moment: Tensor) -> tuple[Tensor, ...]:
    new = 0.9 * moment + gradient.double()
    moment.copy_(new)
    parameter.copy_(parameter - new)
    return ()


def softmax(square: Tensor, parameter: Tensor, moment: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the loss has sums over rows in it, which the parameter's own update would spoil."""
    likely = torch.softmax(parameter, 1)
    slope = 2 * likely
    gradient = likely * (slope - (slope * likely).sum(1, keepdim=True))
    new, new_square = 0.9 * moment + gradient, 0.9 * square + gradient * gradient
    moment.copy_(new)
    square.copy_(new_square)
    parameter.copy_(parameter - 0.1 * new / (new_square.sqrt() + 1e-8))
    return (likely.square().sum(),)


def traced(function: Callable, *sizes: int) -> StepGraph:
    module = make_fx(function, decomposition_table=inductor.decompositions(), tracing_mode="fake")(
        *(torch.rand(sizes) for _ in range(3)))
    return StepGraph(module, ())


def lines(step: StepGraph) -> list[str]:
    return [f"{node} = {node.target}{node.args}" for node in step.graph.nodes]


def test_readers_after_the_copy():
    step = traced(update, 4, 5)
    before, after = lines(step), lines(read_back(step))
    assert lines(step) == before
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [("mul_1 = aten.mul.Tensor(add, 0.1)", "mul_1 = aten.mul.Tensor(copy_, 0.1)")]


@pytest.mark.parametrize("function, changed", [(twice, 1), (rounded, 0), (lambda g, p, m: (p.copy_(g), m + g), 0)])
def test_what_is_left_alone(function: Callable, changed: int):
    """What is read after the input is written again, what was rounded, and a copied input."""
    step = traced(function, 4, 5)
    again = read_back(step)
    assert sum(old != new for old, new in zip(lines(step), lines(again), strict=True)) == changed
    assert changed or again is step


@pytest.mark.inductor
@pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler")
@pytest.mark.parametrize("function", [update, twice, softmax])
def test_numbers_and_bytes(function: Callable, monkeypatch):
    step, given = traced(function, 32, 64), [torch.rand(32, 64) for _ in range(3)]
    lowered = inductor.lower(step)
    expected = [value.clone() for value in given]
    results = function(*expected)
    torch.testing.assert_close(tuple(lowered(list(given))), tuple(results))
    torch.testing.assert_close(given, expected)
    if function is softmax:
        monkeypatch.setattr(inductor, "read_back", lambda step: step)
        apart = inductor.lower(step).transient_peak_bytes()
        assert lowered.transient_peak_bytes() <= apart - given[0].nbytes
