"""Every way of writing a step in `rows` equals eager to float64 rounding, in one graph."""

from __future__ import annotations

import linecache
import logging
import re
from pathlib import Path

import pytest
import rows
import rows_names
import rows_scaler
import rows_schedulers
import torch
from harness import STEPS, compiled, largest_difference, train
from loops import mlp
from torch import nn
from torch._dynamo.variables import builder

import memopt_compile as memopt


def check(build, whole: bool = True, graphs: int = 2, tolerance: float = 1e-9, until: int = STEPS,
          lowering: str = "eager"):
    expected = train(build)
    got, compilations = compiled(build, lowering, until=until)
    difference, where = largest_difference(expected, got)
    assert difference <= tolerance, f"{where}: {difference:.3e}"
    steps = [c for c in compilations if c.kind == "step"]
    others = [(c.kind, c.where) for c in compilations if c.kind != "step"]
    if whole:
        assert steps and not others, others
        assert not [c.reason for c in compilations if c.reason]
        assert len(steps) <= graphs
    return compilations


# Steps that alternate between two shapes of work need a graph for each, and one more when the
# optimizer's state has grown by the parameters that the first call did not use. torch takes a count of 0 or 1 for a constant.
CHANGED = ("module_hook_in_some_steps", "hook_of_all_modules_in_some_steps", "scheduler_attached_in_the_middle",
           "weights_loaded_in_place_of_the_old", "weight_replaced",
           "methods_of_classes_replaced_in_the_middle", "things_that_are_not_there_at_first",
           *(name for name in rows.ROWS if rows.ROWS[name].__module__ == rows_names.__name__),
           "weights_tied_in_the_middle", "optimizer_of_other_parameters")
COUNTED = {"optimizer_that_counts": 4, **dict.fromkeys(("window_of_losses", "means_of_losses", "lookahead", "counts_of_a_global_optimizer"), 3), "weighted_means": 4}  # its rate warms up from zero
GRAPHS = {"unused_in_some_steps": 3, "step_of_the_class_replaced_in_the_middle": 4, "group_added_in_the_middle": 4, "two_compiled_steps": 4,
          "texts_as_keys": STEPS,
          **COUNTED, **dict.fromkeys(CHANGED, 4)}
# The second call finds the optimizer's state, and is the last that makes a graph, save where a later one is
# the first of its kind: with a short batch, other parameters, another group.
UNTIL = {"unused_in_some_steps": 3, "short_last_batch": 4, "unfrozen_in_the_middle": 4, "batch_norm_of_all_batches": 5,
         "step_of_the_class_replaced_in_the_middle": STEPS,
         "texts_as_keys": STEPS, "group_added_in_the_middle": 5, **COUNTED, **dict.fromkeys(CHANGED, 4), "methods_of_classes_replaced_in_the_middle": 5,
         "things_that_are_not_there_at_first": 5}
# Of steps that make a leaf of their own, which ends a graph before torch 2.12: those whose forward is behind it, and whole.
AHEAD = ("gradient_penalty", "attack_in_place", "attack_with_inputs_named")

LINE = re.compile(r"(\w+\.py):(\d+)(?: `(.+?)`)?: not captured whole: .+\. It runs by the ordinary path, with right "
                  r"numbers and without memopt's savings\. Remedy: .+", re.DOTALL)


@pytest.mark.parametrize("name", rows.ROWS)
@pytest.mark.table(12)
def test_row(name):
    check(rows.ROWS[name], graphs=GRAPHS.get(name, 2), until=UNTIL.get(name, 2))


@pytest.mark.parametrize("name", ["groups_changed_by_the_step", "random_numbers_of_numpy"])
def test_row_under_a_default_device(name):
    """Which is a mode: Dynamo would have it multiply Python's and NumPy's numbers too."""
    with torch.device("cpu"):
        test_row(name)


@pytest.mark.parametrize("name", rows.OPTIMIZERS)
@pytest.mark.table(6)
def test_optimizer(name):
    check(lambda: rows.with_optimizer(name), until=2)


@pytest.mark.parametrize("name", [name for name in rows.OPTIMIZERS if name not in (
    "Muon", "SGD_dampening")])  # that trains no bias, whose gradient stays inf; this makes its states of gradients
@pytest.mark.table(6)
def test_optimizer_with_a_scaler(name):
    def build():
        trained = rows.with_optimizer(name)
        return rows_scaler.with_scaler(trained.modules[0], trained.optimizers[0])

    check(build, until=2)


def test_states_made_in_a_step_that_may_be_left_out():
    """Behind which the step is captured whole, also where a parameter never has any."""
    def build():
        model = nn.ModuleList([mlp(), mlp()])
        return rows_scaler.with_scaler(model[0], rows_scaler.Lion(model.parameters()))

    first, *_, last = check(build, whole=False)
    assert "makes its states" in first.reason and (last.kind, last.reason) == ("step", None)


@pytest.mark.parametrize("name", rows_schedulers.READS)
def test_numbers_that_a_scheduler_writes_are_read_behind_it(name):
    first, *_ = check(rows_schedulers.READS[name], whole=False)
    assert (first.kind, first.reason) == ("step", None)


def test_a_state_that_making_one_changes():
    """Is made by Python, and its class beside the step."""
    check(rows_names.state_that_making_one_changes, whole=False)


def test_super_step_of_a_class_with_torchs_wrapper():
    """Which is around the step of each class that has an optimizer, and runs hooks of all: `quantize_parameters_` has one."""
    memopt.quantize_parameters_(mlp())
    torch.optim.SGD(mlp().parameters(), 0.1)
    test_row("optimizer_that_counts")


def test_what_a_step_counts_is_no_size_to_a_budget():
    build = rows.ROWS["optimizer_that_counts"]
    _, free = compiled(build, until=STEPS)
    _, kept = compiled(build, until=STEPS, memory_budget="1GiB")
    assert {c.kind for c in kept} == {"step"} and len(kept) == len(free) < STEPS


def test_lists_of_other_compilations():
    """How Dynamo takes a list it keeps for the process: a step's is its own, whoever compiled first, and nobody else's."""
    builder.VariableBuilder._type_dispatch_impl.cache_clear()
    torch.compile(lambda x, items: x + len(items), backend="eager")(torch.ones(2), [1, 2])
    check(rows.ROWS["lists_that_grow"], until=2)
    assert builder.VariableBuilder._type_dispatch()[list] is builder.VariableBuilder.wrap_listlike


def test_betas_that_change_in_float32():
    """There the optimizer casts them: a number of the user's has to have a tensor's methods."""
    build = rows.ROWS["one_cycle_changes_betas"]
    expected, (got, _) = train(build, dtype=torch.float32), compiled(build, dtype=torch.float32)
    difference, where = largest_difference(expected, got)
    assert difference <= 1e-5, f"{where}: {difference:.3e}"


@pytest.mark.parametrize("name", rows.ORDINARY)
@pytest.mark.table(4)
def test_ordinary_path(name, caplog):
    with caplog.at_level(logging.WARNING, "memopt_compile"):
        compilations = check(rows.ORDINARY[name], whole=False)
    assert not any(c.where.startswith("adam") for c in compilations), "an update by itself"
    lines = [r.message for r in caplog.records if "not captured whole" in r.message]
    if name in AHEAD:
        assert not lines and any(c.kind == "step" for c in compilations)
        return
    (line,) = lines
    file, number, quoted = LINE.fullmatch(line).groups()
    there = linecache.getline(str(Path(rows.__file__).with_name(file)), int(number)).strip()
    assert there and quoted in (None, there)


@pytest.mark.parametrize(("name", "remedy"), [
    *((f"grad_scaler_and_{what}", "outside of the optimizer's step") for what in (
        "adama", "a_mean_of_weights", "an_update_that_counts")),
    ("grad_scaler_and_states_made_in_its_step", "call the step once before"), ("scheduler_ahead_of_the_update", "call it behind the step"),
    ("packed_lstm", "the padded batch"), ("context_that_cannot_be_traced", "call it outside of the step"),
    ("hook_that_writes", "have the gradient computed"), ("hook_that_asks_for_strides", "ask of its shape"),
    ("hook_behind_a_break", "Remove the")])
def test_the_line_says_what_to_do(name, remedy, caplog):
    """Where Dynamo says of a function of torch's no more than to avoid it."""
    with caplog.at_level(logging.WARNING, "memopt_compile"):
        check(rows.ORDINARY[name], whole=False)
    (line,) = [r.message for r in caplog.records if "not captured whole" in r.message]
    assert remedy in line and "torch/" not in line


@pytest.mark.parametrize("name", [name for name in rows.ORDINARY if name not in (
    "loss_divided_by_its_number",)])  # one graph then
@pytest.mark.table(4)
def test_fullgraph_refuses(name, caplog):
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        train(rows.ORDINARY[name], lambda f: torch.compile(f, backend="memopt", fullgraph=True,
                                             options={"lowering": "eager"}))
    # A step that an earlier test left to Python is torch's own RuntimeError.
    assert any(known in f"{type(caught.value).__module__}: {caught.value}"
               for known in ("torch._dynamo", "memopt", "fullgraph=True found no compiled frames"))
    if name != "tracer_that_fails":  # before anything of the trace was seen
        assert "runs by the ordinary path" not in caplog.text


def test_autocast():
    expected = train(rows.autocast, dtype=torch.float32)
    got, made = compiled(rows.autocast, dtype=torch.float32, until=2)
    assert largest_difference(expected, got)[0] <= 2e-2
    assert [record.kind for record in made] == ["step"] * len(made)
