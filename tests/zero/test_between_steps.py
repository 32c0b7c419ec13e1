"""What a program does besides steps, and numbers that it reads off them. Where one rank alone does what all have to do together, that is an error on all
of them, which names what each is about to do. A plan is one rank's own. Rows can be copied and saved, in every stage and on every rank."""

from __future__ import annotations

import copy
import io
import math

import cases
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks, once
from test_sharding import DOUBLE, compiled, says
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import memopt_compile as memopt
from memopt_compile import records

GATHERS = {1: 5, 3: 10}  # calls of a step, by stage; one for the largest gradient
RUNS = "rank 0 runs the step test_between_steps.py"


def alone(rank, ranks, replicas=1):
    """Rank 0 goes on with the next step, or compiles another one; the last does something else."""
    model = cases.made(cases.even, DOUBLE)
    opt = cases.sgd(model)
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("nodes", "node"))
    shared = mesh if replicas > 1 else mesh["node"]
    memopt.shard_(model, opt, shared, stage=2)
    last = rank == ranks - 1

    def step(x, y, updates):
        F.cross_entropy(model(x), y).backward()
        if updates:
            opt.step()
            opt.zero_grad()

    run, batch = memopt.compile(step, zero=2, lowering="eager"), next(cases.batches(rank, ranks, DOUBLE))
    evaluate = memopt.compile(lambda x: model(x), zero=2, lowering="eager")
    if last:  # asks for a plan alone, of which nothing runs
        assert memopt.explain(step, *batch, True, zero=2, lowering="eager").predicted_peak_bytes
    run(*batch, True)
    evaluate(batch[0])
    state = model.state_dict()

    def instead(function):
        return says(lambda: function() if last else run(*batch, True))

    me = f"rank {ranks - 1}"
    found = {
        f"{RUNS}|{me} reads 0.weight": instead(lambda: model(batch[0])),
        f"{RUNS}|{me} runs the model test_between_steps.py": instead(lambda: evaluate(batch[0])),
        f"{RUNS}|{me} gathers a DTensor of shape (16, 6)": instead(state["0.weight"].full_tensor),
        f"{RUNS}|{me} shards a model": instead(lambda: memopt.shard_(other := cases.even(), cases.sgd(other), shared)),
        f"{RUNS}|{me} saves 0.weight by torch.distributed.checkpoint": instead(  # with which a save begins
            lambda: state["0.weight"].__create_write_items__("0.weight", state["0.weight"]))}
    if replicas == 1:
        found |= {"rank 0 gathers a DTensor of shape (16, 6)|rank 1 gathers a DTensor of shape (16,)": says(
                      lambda: list(model.parameters())[last].full_tensor()),
                  "rank 0 runs the step|rank 1 compiles the step": says(lambda: run(*batch, not last)),
                  "rank 0 runs a part of the step|by the ordinary path; rank 1 compiles the step": number_read(rank, ranks, batch)}
    elif rank < ranks // replicas:
        state["0.weight"].full_tensor()  # one replica saves; the other waits for its next step
    run(*batch, True)  # and all is as it was
    return found


def number_read(rank, ranks, batch):
    """Before the update, and on one rank: there the step is cut in two."""
    model = cases.made(cases.even, DOUBLE)
    opt = cases.sgd(model)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=3)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        if rank == 0 and loss.item() < 0:
            raise ValueError
        loss.backward()
        opt.step()
        opt.zero_grad()

    return says(lambda: memopt.compile(step, zero=3, lowering="eager")(*batch))


def kept(rank, ranks):
    """Copies and files of a model in two stages, before and after a step that changes it."""
    found = []
    for stage in (2, 3):
        model, opt, step, run = compiled(rank, ranks, stage)
        batch = next(cases.batches(rank, ranks, DOUBLE))
        run(*batch)
        before, file = cases.whole(model), io.BytesIO()
        copies = [copy.deepcopy(model.state_dict()), dict(copy.deepcopy(model).named_parameters())]
        torch.save((model.state_dict(), opt.state_dict()), file)
        assert not any(isinstance(value, nn.Parameter) for value in copies[0].values())
        assert all(isinstance(value, nn.Parameter) and value.requires_grad for value in copies[1].values())
        losses = [float(run(*batch)) for _ in range(2)]
        file.seek(0)
        states = torch.load(file)
        copies.append(states[0])
        rows = {value.to_local().untyped_storage().nbytes() == value.to_local().nbytes for value in states[0].values()}
        for each in copies:
            assert all(isinstance(value, DTensor) and torch.equal(value.full_tensor(), before[name])
                       for name, value in each.items())
        for each, saved in zip((model, opt), states):
            each.load_state_dict(saved)
        found.append((rows, losses == [float(run(*batch)) for _ in range(2)]))
    return found


def numbers(batches, stage, mesh=None, of_part=""):
    """The largest gradient (of some parameters one of two ranks has no rows) and the sum of the squares of all parameters,
    read off tensors in the step. With `of_part` the squares of what this rank has are in the loss, or `read`."""
    model = cases.made(cases.Uneven, DOUBLE)
    opt = cases.sgd(model)
    if mesh is not None:
        memopt.shard_(model, opt, mesh, stage=stage)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        if of_part == "in the loss":
            loss = loss + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf)
        squares = sum(p.detach().square().sum() for p in model.parameters() if p.requires_grad and p.dim())
        of_first = model.first.weight.detach().norm()
        model.second.weight.detach().norm()  # which nobody reads
        opt.step()
        opt.zero_grad()
        if of_part == "read":
            squares = dict(model.named_parameters())["first.weight"].detach().square().sum()
        elif mesh is not None:
            squares = squares.full_tensor()
        return norm.item(), squares.item(), of_first.item()

    run = memopt.compile(step, zero=stage, lowering="eager")
    found = [run(*batch) for batch in batches]
    record = records.compilations(step.__code__)[-1]
    assert (record.kind, record.reason) == ("step", None)
    gathers = (record.collectives or "").count("all_gather_into_tensor")
    return torch.tensor(found, dtype=DOUBLE), gathers


def of_two(rank, ranks):
    mesh, batches = init_device_mesh("cpu", (ranks,)), list(cases.batches(rank, ranks, DOUBLE))
    read = {stage: numbers(batches, stage, mesh) for stage in (1, 3)}
    mixed, of_part = (says(lambda how=how: numbers(batches, 3, mesh, of_part=how)) for how in ("in the loss", "read"))
    return alone(rank, ranks), kept(rank, ranks), read, mixed, of_part


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "between steps", lambda folder: on_ranks(2, folder, of_two, 2))


def is_an_error(ranks):
    for rank in ranks:
        assert len(rank) >= 4
        for words, (kind, text) in rank.items():
            assert kind == "RankError"
            for word in words.split("|"):
                assert word in text


def test_one_that_does_something_else_is_an_error_on_all(pair):
    is_an_error(each for each, *_ in pair)


@pytest.mark.thorough
def test_so_it_is_in_replicas(tmp_path):
    is_an_error(on_ranks(4, tmp_path, alone, 4, 2))


def test_rows_are_copied_and_saved_alone(pair):
    for _, found, *_ in pair:
        assert found == [({True}, True), ({True}, True)]


def test_numbers_are_those_of_one_process(pair):
    """And what is asked of a parameter for nothing is not gathered for it, whatever rows ranks have."""
    rows = [cases.batches(rank, 2, DOUBLE) for rank in (0, 1)]
    expected, _ = numbers([tuple(map(torch.cat, zip(*each))) for each in zip(*rows)], 0)
    for _, _, read, *_ in pair:
        for found, _ in read.values():
            assert float((found - expected).abs().max()) <= 1e-11
        assert [gathers for _, gathers in read.values()] == [GATHERS[1], GATHERS[3]]


def test_a_number_of_a_part_is_refused(pair):
    for *_, (mixed, says_what), (kind, text) in pair:
        assert mixed == "OptionError" and "computed from whole tensors and from p of model.parameters()" in says_what
        assert kind == "OptionError" and "a number is read off a DTensor of which each rank has a part" in text
