"""Run scripts from a process that has imported torch, Inductor and memopt: that takes each four seconds.

They start with no module of theirs, no graph and no argument of the tests, as `python script.py` does. What
they would not find without these imports is not found out here: some documents and examples are run by
Python itself.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

IMPORTED = ["memopt_compile.driver", "torch._inductor.compile_fx"]


def spare_time() -> None:
    """What imports have made is not gone through for garbage again and again; and Dynamo does not measure how long the
    guards of each graph take, for which it empties the processor's cache, a hundredth of the time of all tests."""
    import torch._dynamo.guards as guards

    guards.profile_guard_manager = lambda *_: 0.0
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


def server() -> multiprocessing.context.ForkServerContext:
    """Starts processes in which `IMPORTED` is there."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def run_script(script: Path, *arguments: str, folder: Path | None = None,
               variables: Mapping[str, str] = os.environ, seconds: float = 600) -> str:
    """What `python script arguments` prints in `folder`, which has to end well."""
    with tempfile.TemporaryDirectory() as place:
        said = Path(place, "said")
        process = server().Process(target=_run, args=(script, arguments, folder or Path.cwd(), dict(variables), said))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        text = said.read_text() if said.exists() else ""
        assert process.exitcode == 0, f"{script.name} ended with {process.exitcode}\n{text[-4000:]}"
        return text


def _run(script: Path, arguments: tuple[str, ...], folder: Path, variables: dict[str, str], said: Path) -> None:
    spare_time()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
