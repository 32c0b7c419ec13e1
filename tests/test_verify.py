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


class Norms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Linear(8, 5)
        self.norms = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.GroupNorm(2, 8), torch.nn.InstanceNorm2d(8, affine=True))
        self.rows = torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.last(self.rows(self.norms(self.first(x)).relu().mean((2, 3)).bfloat16()))


def test_statistics_of_norms_under_autocast_are_in_the_kernels_type():
    """In float32, and their bytes in the prediction. torch says bfloat16."""
    model = Norms()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = memopt.compile(step, lowering="eager", verify=True)
    run(torch.randn(16, 3, 12, 12), torch.randint(5, (16,)))
    found = memopt.report(run)
    assert found.predicted_peak_bytes == found.measured_peak_bytes


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


def forgets_a_phase(step):
    step.phases.popitem()


def forgets_a_role(step):
    step.inputs = step.inputs[:-1]


def turns_the_order(step):
    first, last, *_ = step.computing()
    last.append(first)


@pytest.mark.parametrize("spoil, words", [
    (forgets_a_phase, "without a phase"), (forgets_a_role, "roles"), (turns_the_order, "before it has been defined")])
def test_what_a_pass_leaves_as_it_was_is_not_all_that_is_looked_at(spoil, words):
    """The same nodes are not verified again; their phases, inputs and order are."""
    class Spoils(StepPass):
        name: ClassVar[str] = "spoils"

        def run(self, step, costs=None):
            spoil(step)

    with pytest.raises(memopt.PassError, match=words):
        pipelines.run(two_layers(), [Spoils()])
