"""Lines about work that takes long: where it is, and nothing of what is soon done."""

import logging
from functools import partial

import pytest
import torch
from torch import nn

import memopt_compile as memopt
from memopt_compile import progress


def explained(**options):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    return memopt.explain(step, torch.randn(64, 32), **options)


@pytest.fixture
def lines(monkeypatch, capsys):
    """On stderr, as where nobody has set logging up."""
    monkeypatch.setattr(progress.log, "hasHandlers", lambda: False)
    return lambda: capsys.readouterr().err.splitlines()


def test_what_is_soon_done_says_nothing(lines):
    explained(lowering="eager", memory_budget=0.8)
    assert not [line for line in lines() if line.startswith("memopt: ")]


@pytest.mark.inductor
def test_each_stage_can_be_told(lines, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    explained(memory_budget=0.7)
    found = [line for line in lines() if line.startswith("memopt: ")]
    assert all("test_progress.py:" in line for line in found)
    for stage in ("planning for ", "KiB, plan_memory (", "plan_memory, an integer program of ", "lowering piece 1 of "):
        assert any(stage in line for line in found), stage
    assert ": done in " in found[-1]


def test_logging_has_the_lines_where_it_is_set_up(caplog, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    with caplog.at_level(logging.WARNING, "memopt_compile.progress"), progress.stage("quiet"):
        pass
    assert not caplog.records
    with caplog.at_level(logging.INFO, "memopt_compile.progress"), progress.stage("outer"), progress.stage("inner"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["outer", "outer: inner (0 s)", "outer: done in 0 s"]


def test_a_level_silences_stderr_too_and_other_ranks_say_nothing(lines, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    progress.log.setLevel(logging.WARNING)
    with progress.stage("quiet"):
        pass
    progress.log.setLevel(logging.INFO)
    monkeypatch.setattr(progress.dist, "is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(progress.dist, "get_rank", partial(int, rank))
        with progress.stage(f"of rank {rank}"):
            pass
    assert lines() == ["memopt: of rank 0", "memopt: of rank 0: done in 0 s"]


def test_an_error_ends_all_stages_and_is_not_done(lines, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    with pytest.raises(ValueError), progress.stage("outer"), progress.stage("inner"):
        raise ValueError
    assert lines() == ["memopt: outer", "memopt: outer: inner (0 s)"] and not progress._stages
