"""Cutting a step: repetition, the same pieces at any depth, and no alias across a cut."""

import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from memopt_compile.backends.inductor import _load, source
from memopt_compile.lowering.pieces import (
    Piece,
    body,
    can_cut,
    is_view,
    one_piece,
    pieces,
    program_reads,
)
from memopt_compile.lowering.repetition import longest_repetition
from memopt_compile.step_graph import Input, Phase, Role, StepGraph, nbytes, storage_roots


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def traced(function, *inputs) -> StepGraph:
    module = make_fx(lambda *given: as_tuple(function(*given)), tracing_mode="fake")(*inputs)
    given = [Input(n.name, Role.PARAMETER, n.name, nbytes(n.meta["val"]))
             for n in module.graph.find_nodes(op="placeholder")]
    step = StepGraph(module, tuple(given))
    step.phases = {n: Phase.FORWARD for n in step.computing()}
    step.verify()
    return step


def eager_program(step: StepGraph, parts: list[Piece]) -> Callable[[list], tuple]:
    """The program that calls `parts`, not compiled."""
    names = [f"piece_{i}" for i in range(len(parts))]
    text, objects = source(step, list(zip(names, parts)))

    def call(part: Piece) -> Callable[[list], tuple]:
        return lambda given: part.module()(*given)

    return _load(text, {**objects, **dict(zip(names, map(call, parts)))})


def training(depth: int, width: int = 16) -> StepGraph:
    """Layers that keep ``weight.t()`` for backward, each updated as soon as it has its gradient."""

    def step(x: Tensor, *weights: Tensor) -> Tensor:
        saved = []
        for weight in weights:
            turned = weight.t()
            saved.append((x, turned))
            x = torch.tanh(torch.mm(x, turned).sin().mul(0.5).add(1.0)).exp().sub(1.0).cos()
        loss = x.square().mean()
        gradient = x * 2
        for (read, turned), weight in zip(reversed(saved), reversed(weights)):
            gradient = torch.tanh(gradient).sin().cos().exp().sub(1.0)
            of_weight = torch.mm(gradient.t(), read)
            gradient = torch.mm(gradient, turned.t())
            weight.copy_(weight * 0.99 - 0.1 * of_weight.sin().cos())
        return loss

    return traced(step, torch.randn(8, width), *(torch.randn(width, width) for _ in range(depth)))


def test_repetition_is_the_longest_with_the_shortest_period():
    layer = np.arange(1, 15)
    labels = np.concatenate([[100, 101], np.tile(layer, 4), [1, 2, 3, 200]])
    assert longest_repetition(labels) == (2, 14, 4 * 14 + 3)
    assert longest_repetition(np.arange(50)) is None
    assert longest_repetition(np.array([], dtype=np.int64)) is None


@pytest.mark.parametrize("depth", [4, 8, 16])
def test_depth_adds_no_distinct_piece(depth):
    parts = pieces(training(depth))
    counts = [sum(p.key == key for p in parts) for key in {p.key for p in parts}]
    assert len(counts) <= 5
    assert max(counts) >= depth - 1


def test_every_operator_runs_once_in_the_plans_order():
    step = training(6)
    ran = [node.target for piece in pieces(step) for node in piece.graph.nodes
           if node.op == "call_function" and not is_view(node)]
    assert ran == [node.target for node in body(step)]


def test_no_two_inputs_of_a_piece_share_storage_and_none_is_a_view():
    step = training(6)
    roots = storage_roots(step.graph)
    assert any(is_view(node) for node in step.graph.nodes)
    for piece in pieces(step):
        assert not any(is_view(node) for node in (*piece.inputs, *piece.outputs))
        owners = [owner for node in piece.inputs for owner in roots[node]]
        assert len(owners) == len(set(owners))


def test_each_value_is_made_before_it_is_read_and_handed_on_only_if_read():
    step = training(6)
    made = set(step.placeholders)
    parts = pieces(step)
    for piece in parts:
        assert made.issuperset(piece.inputs)
        made.update(piece.outputs)
    read = {n for piece in parts for n in piece.inputs} | program_reads(step)
    assert all(read.issuperset(piece.outputs) for piece in parts)


def test_items_stay_with_their_operator():
    def step(x):
        values, places = torch.ops.aten.max.dim(x, 1)
        for _ in range(60):
            values = values.sin()
        return values + places

    parts = pieces(traced(step, torch.randn(4, 4)))
    assert len(parts) > 1
    crossing = [node for piece in parts for node in (*piece.inputs, *piece.outputs)]
    assert all(isinstance(node.meta["val"], Tensor) for node in crossing)
    assert any(node.target is operator.getitem for node in crossing)


def test_a_number_that_the_graph_tells_crosses_no_cut():
    def step(x):
        number = torch.ops.aten.full.default([], 2.0, dtype=x.dtype)
        made = number.expand(4)
        for _ in range(60):
            x = torch.where(x > 0, x.sin(), number)
        return x + made, number

    step = traced(step, torch.randn(4, 4))
    parts = pieces(step)
    assert len(parts) > 1
    assert all(node.meta["val"].dim() for piece in parts for node in (*piece.inputs, *piece.outputs))
    assert all(any(str(n.target) == "aten.full.default" for n in piece.graph.nodes) for piece in parts)
    assert len({piece.key for piece in parts}) < len(parts)
    values = [torch.randn(4, 4)]
    for ours, eager in zip(eager_program(step, parts)(list(values)), step.module(*values)):
        assert torch.equal(ours, eager)


def test_dead_operators_are_left_out():
    step = traced(lambda x: x.sin(), torch.randn(3))
    with step.graph.inserting_after(step.placeholders[0]):
        step.graph.call_function(torch.ops.aten.cos.default, (step.placeholders[0],))
    assert [n.target for n in body(step)] == [torch.ops.aten.sin.default]


def test_keys_tell_shapes_constants_and_layouts_apart():
    def key(function, *inputs):
        return pieces(traced(function, *inputs))[0].key

    x = torch.randn(4, 6)
    keys = [key(lambda v: v * 2, x), key(lambda v: v * 3, x), key(lambda v: v * 2.0, x),
            key(lambda v: v * 2, x.double()), key(lambda v: v * 2, torch.randn(6, 4)),
            key(lambda v: v * 2, torch.randn(6, 4).t()), key(lambda v: (v * 2, v * 2), x),
            key(lambda v: v.mul_(2), x)]
    assert len(set(keys)) == len(keys)
    assert key(lambda other: other * 2, x.clone()) == keys[0]


def test_symbolic_sizes_make_one_piece():
    module = make_fx(lambda x: (x.sum() * x.shape[0],), tracing_mode="symbolic")(torch.randn(4, 3))
    step = StepGraph(module, ())
    assert not can_cut(step)
    assert one_piece(step).key is None


def with_sizes(function) -> StepGraph:
    """The trace of a function of eight rows and which of them to keep."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = torch.randn(8, 3), torch.ones(8, dtype=torch.bool)
        return StepGraph(make_fx(lambda *values: (function(*values),), tracing_mode="real")(*given), ())


def test_a_size_that_only_the_data_tell_stays_within_a_piece():
    def step(x: Tensor, keep: Tensor) -> Tensor:
        for _ in range(60):
            x = x.sin()
        kept = x[keep].cos()
        for _ in range(60):
            x = x.sin()
        return x.index_put((keep,), kept * 2)

    def longer(x: Tensor, keep: Tensor) -> Tensor:
        for _ in range(60):
            x = x.sin()
        x = x.index_put((keep,), x[keep].cos())
        for _ in range(60):
            x = x.sin()
        return x

    for function, count in (step, 2), (longer, 3):
        graph = with_sizes(function)
        parts = pieces(graph)
        assert can_cut(graph) and len(parts) >= count
        assert len([part for part in parts if part.key is None]) == 1
        assert all(isinstance(n, int) for part in parts for value in (*part.inputs, *part.outputs)
                   for n in value.meta["val"].shape)


def test_a_size_that_only_the_data_tell_is_handed_to_nobody():
    assert not can_cut(with_sizes(lambda x, keep: x.sin()[keep]))


def test_micro_batches_share_their_pieces():
    """The program slices the batch, so that the offset of a slice makes no piece of its own."""
    def step(x, w):
        total = 0.0
        for start in range(0, 8, 2):
            part = x[start:start + 2]
            for _ in range(20):
                part = torch.mm(part, w).sin()
            total = total + part.sum()
        return total

    parts = pieces(traced(step, torch.randn(8, 4), torch.randn(4, 4)))
    sliced = [p for p in parts if any(n.target is torch.ops.aten.slice.Tensor for n in p.inputs)]
    assert len(sliced) == 4 and len({p.key for p in sliced[1:]}) == 1
    assert not any(n.target is torch.ops.aten.slice.Tensor for p in parts
                   for n in p.graph.nodes)


def test_slices_of_what_is_written_stay_inside():
    def step(x):
        head = x[:2].sin()
        x.mul_(2)
        return head + x[2:]

    (part,) = pieces(traced(step, torch.randn(4)))
    assert [n.op for n in part.inputs] == ["placeholder"]


def test_what_the_caller_owns_is_told_by_its_name():
    """Inductor takes any other input for one that its last reader frees."""
    step = training(4)
    for piece in (*pieces(step), one_piece(step)):
        placeholders = piece.graph.find_nodes(op="placeholder")
        assert [n.target.startswith("arg") for n in placeholders] == [n.op == "placeholder" for n in piece.inputs]
