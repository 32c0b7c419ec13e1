"""What a user's own process does by the variables it is started with: the logs, the structured trace, the
caches of compiled code, and no compiler at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TLPARSE = Path(sys.executable).with_name("tlparse")
PROGRAM = """
import json, torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
opt = torch.optim.AdamW(model.parameters())

def step(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()

x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
run = torch.compile(step, backend="memopt")
losses = []
for _ in range(2):
    losses += [run(x, y).item() for _ in range(3)]
    torch.compiler.reset()
expected = [step(x, y).item() for _ in range(2)]
print(json.dumps({"losses": losses, "eagers": expected, "counters": counters["inductor"]}))
"""


def train(folder: Path, **variables: str) -> tuple[dict, str]:
    """What the program prints, and its log."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True,
                          env=os.environ | variables)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_share_compiled_code(tmp_path):
    """The first has the logs and the trace on; both train on after `torch.compiler.reset()`."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    first, log = train(tmp_path, TORCH_LOGS="+memopt_compile", TORCH_TRACE=str(tmp_path / "trace"), **cache)
    assert first["counters"]["fxgraph_cache_miss"] == first["counters"]["fxgraph_cache_hit"] == 1
    for line in ("train.py:10: whole-step mode: traced 1 backward(s), AdamW, in one graph",
                 "train.py:10: graph before:", "train.py:10: graph after_release_gradients:"):
        assert line in log

    second, log = train(tmp_path, **cache)
    assert "fxgraph_cache_miss" not in second["counters"] and second["counters"]["fxgraph_cache_hit"] == 2
    assert second["losses"] == first["losses"] == sorted(first["losses"], reverse=True)
    assert second["eagers"] == first["eagers"] and second["eagers"][0] < second["losses"][-1]
    assert not log

    trace, = (tmp_path / "trace").iterdir()
    subprocess.run([TLPARSE, trace, "-o", tmp_path / "pages", "--no-browser"], check=True)
    index = (tmp_path / "pages" / "index.html").read_text()
    for name in ("memopt_before", "memopt_after_release_gradients", "memopt_report"):
        pages = re.findall(rf'href="?([^">]*/{name}_\d+\.txt)', index)
        assert len(pages) == 2  # one for each compilation
    assert "whole step; inductor lowering" in (tmp_path / "pages" / pages[0]).read_text()


def test_no_compiler_is_said_once(tmp_path):
    """Two graphs are compiled, before and after the reset; eager's own numbers come out."""
    result, log = train(tmp_path, CXX="no-such-compiler", PATH="")
    assert log.count("no C++ compiler found: running the eager lowering") == len(log.splitlines()) == 1
    assert result["losses"] == sorted(result["losses"], reverse=True)
