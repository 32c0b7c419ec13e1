"""Results that a piece stores between library calls: which ones, their bytes and their numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_compile.backends import inductor
from memopt_compile.compat.inductor import STORE
from memopt_compile.lowering import compiled_pieces
from memopt_compile.lowering.storing import read_before_writes, store_before_updates, store_between
from memopt_compile.step_graph import StepGraph

GIVEN = torch.randn(256, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)


def residual(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = x @ w, w @ x
    both = torch.where(x <= 0, 0, a * b)
    return (torch.relu(both) @ w @ w * both,)


def without_call(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = x @ w, w @ x
    both = torch.where(x <= 0, 0, a * b)
    return (torch.relu(both).sum(1) + both.sum(0),)


def operands_stay(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = x @ w, w @ x
    both = a * b
    return (torch.relu(both) @ w * both, a, b)


def one_operand(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    both = (x @ w).neg()
    return (torch.relu(both) @ w * both,)


def read_by_call(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = x @ w, w @ x
    both = a * b
    return (both @ w * both,)


@pytest.mark.parametrize("function, stored", [
    (residual, 1), (without_call, 0), (operands_stay, 0), (one_operand, 0), (read_by_call, 0)])
def test_what_is_stored(function: Callable, stored: int):
    module = make_fx(function, tracing_mode="fake")(*GIVEN)
    store_between(module.graph)
    made = module.graph.find_nodes(op="call_function", target=STORE)
    assert len(made) == stored
    for node in made:
        assert node.args[0].target is torch.ops.aten.where.self and list(node.args[0].users) == [node]


def normalized(gradient: Tensor, parameter: Tensor, momentum: Tensor) -> tuple[()]:
    """An update whose gradient has the sum of a row of the parameter in it."""
    new = gradient - parameter * (gradient * parameter).sum(-1, keepdim=True)
    momentum.copy_(0.9 * momentum + new)
    parameter.copy_(parameter - 0.1 * (0.9 * momentum + new))
    return ()


def of_another(gradient: Tensor, parameter: Tensor, momentum: Tensor) -> tuple[()]:
    parameter.copy_(parameter - gradient * (gradient * momentum).sum(-1, keepdim=True))
    return ()


@pytest.mark.parametrize("function, width, stored", [(normalized, 5, 1), (normalized, 64, 0), (of_another, 5, 0)])
def test_small_reductions_are_stored_before_updates(function: Callable, width: int, stored: int):
    module = make_fx(function, tracing_mode="fake")(*(torch.rand(128, width) for _ in range(3)))
    store_before_updates(module.graph)
    made = module.graph.find_nodes(op="call_function", target=STORE)
    assert [node.args[0].target for node in made] == [torch.ops.aten.sum.dim_IntList] * stored


@pytest.mark.inductor
@pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler")
def test_update_beside_small_reduction():
    given = [torch.randn(128, 5, dtype=torch.float64) for _ in range(3)]
    run = inductor.lower(StepGraph(make_fx(normalized, tracing_mode="fake")(*given), ()))
    assert run.transient_peak_bytes() == given[0].nbytes // 5  # the sums; 2.13 would hold the gradient
    normalized(*(expected := [value.clone() for value in given]))
    run(list(given))
    torch.testing.assert_close(given, expected)


def rounded(gradient: Tensor, momentum: Tensor) -> tuple[Tensor, ...]:
    new = 0.9 * momentum.float() + 0.1 * gradient
    momentum.copy_(new.bfloat16())
    return (new - gradient).square().sum(0), (new - gradient).square().sum(1), momentum.sum(0)


def in_place(gradient: Tensor, momentum: Tensor) -> tuple[Tensor, ...]:
    momentum.copy_(0.9 * momentum + 0.1 * gradient)
    return ((momentum - gradient).square().sum(0),)


def read_from_the_write(gradient: Tensor, momentum: Tensor) -> tuple[Tensor, ...]:
    new = 0.9 * momentum.float() + 0.1 * gradient
    written = momentum.copy_(new.bfloat16())
    return ((new - written).square().sum(0),)


@pytest.mark.parametrize("function, ahead", [(rounded, 2), (in_place, 0), (read_from_the_write, 0)])
def test_old_values_are_read_before_a_write(function: Callable, ahead: int):
    dtype = torch.float32 if function is in_place else torch.bfloat16
    module = make_fx(function, tracing_mode="fake")(torch.rand(8, 4), torch.rand(8, 4).to(dtype))
    before = list(module.graph.nodes)
    read_before_writes(module.graph)
    after = list(module.graph.nodes)
    (write,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    sums = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert [s in after[:after.index(write)] for s in sums] == [i < ahead for i in range(len(sums))]
    assert ahead or after == before
    module.graph.lint()


@pytest.mark.inductor
@pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler")
def test_rounded_moments_are_not_held_in_full_precision():
    given = [torch.randn(512, 512), torch.randn(512, 512).bfloat16()]
    run = inductor.lower(StepGraph(make_fx(rounded, tracing_mode="fake")(*given), ()))
    assert run.transient_peak_bytes() <= 4 * 4 * 512  # sums; given[0].nbytes would be what is rounded
    expected = rounded(given[0], written := given[1].clone())
    torch.testing.assert_close(run(list(given)), expected)
    assert torch.equal(given[1], written)


@pytest.mark.inductor
@pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler")
def test_peak_and_numbers(monkeypatch):
    def lowered() -> inductor.Lowered:
        inductor.forget()
        return inductor.lower(StepGraph(make_fx(residual, tracing_mode="fake")(*GIVEN), ()))

    run = lowered()
    torch.testing.assert_close(run(list(GIVEN)), residual(*GIVEN))
    monkeypatch.setattr(compiled_pieces, "store_between", lambda graph: None)
    size = GIVEN[0].nbytes
    assert run.transient_peak_bytes() <= lowered().transient_peak_bytes() - size // 2
