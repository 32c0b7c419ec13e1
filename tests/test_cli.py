"""The command line: what it prints, writes and refuses."""

import os
import subprocess
import sys

import pytest

from memopt_compile.__main__ import main
from memopt_compile.backends.inductor import compiler_available
from memopt_compile.bench import compare

SCRIPT = '''
import torch
import torch.nn.functional as F
from beside import WIDTH

def make():
    model = torch.nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step, (torch.randn(64, WIDTH), torch.randint(0, 4, (64,)))

def wrong():
    return 1

def shared(layers=1):
    from torch.distributed.device_mesh import init_device_mesh
    import memopt_compile as memopt
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memopt.shard_(model, optimizer, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step, (torch.randn(64, WIDTH),)
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in ("beside", "train_it"):
        sys.modules.pop(name, None)


def test_explain_prints_and_writes(script, tmp_path, capsys):
    picture, folder = tmp_path / "memory.svg", tmp_path / "dumped"
    assert main(["explain", f"{script}:make", "-o", "lowering=eager", "-o", "memory_budget=1GiB",
                 "--svg", str(picture), "--dump", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "train_it.py" in printed and "budget         1.00 GiB" in printed
    assert picture.read_text().startswith("<svg")
    assert (folder / "00" / "report.txt").exists()


def test_explain_draws_several_budgets(script, tmp_path, capsys):
    picture = tmp_path / "frontier.html"
    assert main(["explain", f"{script}:make", "-o", "lowering=eager", "-o", "memory_budget=[1.0, 0.9, '1GiB', 1]",
                 "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "planned peak" in printed and "1.00 GiB" in printed and "no: the smallest found" in printed
    assert picture.read_text().startswith("<!DOCTYPE html>") and "<circle" in picture.read_text()


def test_explain_plans_for_ranks_that_are_not_there(script, capsys):
    zero = ["-o", "zero=3", "-o", "lowering=eager", "--ranks", "8"]
    assert main(["explain", f"{script}:shared", *zero]) == 0
    assert "parameters 512 B" in capsys.readouterr().out  # an eighth of 32 times 32
    assert main(["explain", f"{script}:shared", *zero, "--layers", "80"]) == 0
    assert "80 layers by plans of 2, 3, 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["explain", "{script}"], "write script.py:function"),
        (["explain", "nowhere.py:make"], "no file"),
        (["explain", "{script}:mak"], "choose from make, wrong, shared"),
        (["explain", "{script}:wrong"], "return step, (x, y)"),
        (["explain", "{script}:make", "-o", "lowring=eager"], "nearest is 'lowering'"),
        (["explain", "{script}:make", "-o", "lowering=eager", "-o", "memory_budget=1000"], "E301"),
        (["explain", "{script}:make", "-o", "memory_budget=[0.9, 0.8]", "--dump", "folder"], "leave dump out"),
        (["explain", "{script}:make", "-o", "lowering=eager", "--svg", "/no/such/x.svg"], "--svg"),
        (["fit", "{script}:make", "-o", "lowering=eager", "--memory", "1000B"], "still needs"),
        (["fit", "{script}:make", "--memory", "6"], "the unit is missing"),
        (["bench", "{script}:make", "-o", "lowring=eager"], "nearest is 'lowering'"),
        (["bench", "{script}:make", "--svg", "nowhere/a.svg"], "there is no folder"),
    ],
)
def test_refusals_say_what_to_do(script, capsys, arguments, problem):
    assert main([each.format(script=script) for each in arguments]) == 1
    assert problem in capsys.readouterr().err


def test_fit(script, capsys):
    assert main(["fit", f"{script}:make", "-o", "lowering=eager", "--memory", "64KiB",
                 "--multiple-of", "8", "--budgeted"]) == 0
    printed = capsys.readouterr()
    assert "fits 64.00 KiB as memory_budget" in printed.out and "batch " in printed.err


@pytest.mark.parametrize("compiler", [{"CXX": "there is none"}, pytest.param({}, marks=pytest.mark.thorough)], ids=str)
def test_bench(script, compiler):
    command = [sys.executable, "-m", "memopt_compile", "bench", f"{script}:make",
               "-o", "lowering=eager"]
    table = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | compiler).stdout
    assert "predicted MiB" in table and "+0.00%" in table
    assert ("torch.compile" in table) is (compiler_available() and not compiler)


def test_a_comparison_goes_on_without_what_a_budget_refuses(capsys):
    """Of processes that only say what `answer` says."""
    said = ("import json, sys\n"
            "one = {'first': 1.0, 'peak': 2 * 2**20, 'live': [0, 2 * 2**20]}\n"
            "print(json.dumps({'refused': 'the smallest peak is 3 MiB'} if '--budget' in sys.argv else one), flush=True)\n"
            "for _ in sys.stdin: print([0.5], flush=True)")
    compare([sys.executable, "-c", said], {"eager": ()}, share=0.5)
    printed = capsys.readouterr().out
    assert "memopt, budget 1.00 MiB is refused: the smallest peak is 3 MiB" in printed
    assert [line.split() for line in printed.splitlines() if line.lstrip().startswith("eager")] == [["eager", "2.00", "1.000", "500", "1.0"]]


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["explain"], ["explain", "x", "-o", "y"]])
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2


def test_help_runs_as_a_module():
    command = [sys.executable, "-m", "memopt_compile", "explain", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "script.py:function" in text and "memory_budget=6GiB" in text
