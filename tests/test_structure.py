"""Layers and micro-batches are found from the graph."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import by_hand, mlp, training_step  # noqa: E402

from memopt_compile.passes.canonicalize import Canonicalize  # noqa: E402
from memopt_compile.step_graph import Phase  # noqa: E402
from memopt_compile.structure import repeats  # noqa: E402


@pytest.mark.parametrize("layers", [3, 8])
def test_layers_of_each_phase(layers):
    step = training_step(mlp(layers))
    Canonicalize().run(step)
    found = {(r.phase, r.operators): r for r in repeats(step)}
    forward = found[Phase.FORWARD, 2]
    assert forward.times == layers and str(forward) == f"{layers} × forward of a layer (2 operators)"
    assert [n.target for n in forward.nodes] == [torch.ops.aten.addmm.default,
                                                 torch.ops.aten.relu.default]
    backward = [r.times for r in found.values() if r.phase is Phase.BACKWARD]
    assert backward == [layers - 1]  # the first layer's input needs no gradient


def test_micro_batches_and_the_layers_inside():
    step = training_step(mlp(4), batch=8, micro_batches=4)
    Canonicalize().run(step)
    found = repeats(step)
    (batches,) = [r for r in found if r.kind == "micro-batch"]
    assert batches.times == 3  # the first one has no gradients to add to
    inside = found[found.index(batches) + 1]
    assert inside.kind == "layer" and set(inside.nodes) < set(batches.nodes)


def test_nothing_repeats():
    assert repeats(by_hand(lambda x: x.sin().exp().cos().sum(), ("x", torch.rand(4)))) == ()
