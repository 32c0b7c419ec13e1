"""What is wrong with a step graph is found, and where."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import by_hand, mlp, training_step, two_layers  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import pipelines  # noqa: E402
from memopt_compile.memory_plan import MemoryPlan  # noqa: E402
from memopt_compile.metadata import check_metadata  # noqa: E402
from memopt_compile.passes.plan_memory import PlanMemory  # noqa: E402
from memopt_compile.step_graph import mutated_args  # noqa: E402
from memopt_compile.step_pass import StepPass  # noqa: E402


@pytest.fixture
def step():
    return training_step(mlp(1))


def test_a_sound_step(step):
    step.verify()
    check_metadata(step)


def test_an_input_without_a_role(step):
    step.inputs = step.inputs[:-1]
    with pytest.raises(memopt.VerifyError, match="roles"):
        step.verify()


def test_a_node_without_a_phase(step):
    node = next(iter(step.computing()))
    del step.phases[node]
    with pytest.raises(memopt.VerifyError, match=f"without a phase: {node.name}"):
        step.verify()


def test_a_parameter_read_after_its_update():
    def update(p, x):
        result = p.sin()
        p.copy_(x)
        return result

    step = by_hand(update, ("p", torch.rand(2)), ("x", torch.rand(2)))
    read, write = step.computing()
    write.append(read)
    with pytest.raises(memopt.VerifyError, match=f"{read.name} reads a value after {write.name}"):
        step.verify()


@pytest.mark.parametrize("spoil", [lambda v: v.float(), lambda v: v.t(), lambda v: v[:1]], ids=["type", "strides", "shape"])
def test_a_value_that_its_operator_does_not_make(spoil):
    step = two_layers()
    node = next(n for n in step.computing() if n.target is torch.ops.aten.mm.default)
    check_metadata(step)
    with node.meta["val"].fake_mode:
        node.meta["val"] = spoil(node.meta["val"])
    with pytest.raises(memopt.VerifyError, match=f"{node.name} is said to be"):
        check_metadata(step)


@dataclass(frozen=True)
class ForgetUpdate(StepPass):
    name: ClassVar[str] = "forget_update"

    def run(self, step, costs=None):
        step.erase(next(n for n in step.computing() if mutated_args(n)))


def test_a_pass_that_drops_an_update(step):
    with pytest.raises(memopt.PassError, match="forget_update.*not written any more"):
        pipelines.run(step, [ForgetUpdate()])


def test_a_plan_of_a_node_that_is_not_there(step):
    step.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset({"nobody"}))
    with pytest.raises(memopt.PassError, match="the plan names nobody"):
        pipelines.run(step, [PlanMemory(1, torch.device("cpu"))])
