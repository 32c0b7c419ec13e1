"""Ways to run one step: bytes and seconds, each way in a process of its own.

A process loads the compiler only if its way needs one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from tabulate import tabulate

from .errors import InfeasibleBudget, MemoptError, OptionError
from .measure import measure
from .options import format_bytes
from .reporting.timeline import draw

TITLES = {"eager": "eager", "inductor": "torch.compile", "memopt": "memopt"}
WAYS = {title: ("--measure", name) for name, title in TITLES.items()}
ROUNDS = 40  # of one call each: a machine's pace drifts within a second, by more than what is measured
ON_CUDA = 10  # calls of a round on a GPU, which goes on when a call returns
HEADERS = ("", "peak MiB", "of the lower", "predicted MiB", "error", "ms a step", "first call s")


def answer(step: Callable, batch: Sequence[Any], backend: str, resident: Any = None) -> None:
    """Print a JSON line of bytes, then for every line on stdin the seconds of one call.

    `step` is compiled for `backend`; `resident` is what it trains, as `memopt.measure` takes it. A budget that
    cannot be kept is the only answer. What a GPU's allocator keeps for the next call is given back between rounds,
    which other processes have.
    """
    def timed(calls: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            step(*batch)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    try:
        found: dict[str, Any] = {"first": timed()}
    except InfeasibleBudget as refusal:
        print(json.dumps({"refused": refusal.what}))
        return
    timed()  # The optimizer's state is there by now and nothing compiles any more.
    on_cuda = torch.cuda.is_initialized()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seen = measure(step, *batch, resident=resident)
    found |= {"peak": seen.peak_bytes, "live": [size for _, size in seen.timeline]}
    if on_cuda:  # with workspace that libraries keep
        found["allocated"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
    if backend == "memopt":
        from .report import report

        found["predicted"] = report(step).predicted_peak_bytes or 0
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        timed()  # behind another process's turn: finds its memory and its caches again
        print(json.dumps([timed(ON_CUDA if on_cuda else 1)]), flush=True)
        if on_cuda:
            torch.cuda.empty_cache()


def compare(command: Sequence[str], ways: Mapping[str, Sequence[str]] = WAYS, share: float | None = None,
            svg: str | None = None) -> None:
    """Run `command`, which calls `answer`, with the arguments of each way, and print one table. With `share` memopt runs
    once more, with this share of the lowest peak of the others as its `--budget`. With `svg` memory over one call of
    each is drawn to that file.

    Each process has a compilation cache of its own, so that none finds what another compiled.
    The timed rounds take turns, so that all see the same machine.
    """
    if svg is not None and not Path(svg).parent.is_dir():
        raise OptionError("there is no folder for the picture", where=svg, do="name a file in a folder that exists")
    names = [name for name in ways if "inductor" not in ways[name] or _has_compiler()]
    workers: dict[str, _Worker] = {}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        def start(name: str, arguments: Sequence[str]) -> None:
            print(f"measuring {name} ...", flush=True)
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            workers[name] = stack.enter_context(_Worker([*command, *arguments], cache))
            found[name] = workers[name].answer()
            if "refused" in found[name]:
                print(f"{name} is refused: {found.pop(name)['refused']}", flush=True)

        for name in names:
            start(name, ways[name])
        lower = min(found[name]["peak"] for name in [n for n in found if "memopt" not in ways[n]] or found)
        budget_bytes = int(share * lower) if share is not None else None
        if budget_bytes is not None:
            budget = format_bytes(budget_bytes)
            start(f"memopt, budget {budget}", ("--measure", "memopt", "--budget", budget))
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(ROUNDS):
            for name in found:
                times[name] += workers[name].ask()
    rows = []
    for name in found:
        peak, predicted = found[name]["peak"], found[name].get("predicted")
        told = (f"{predicted / 2**20:.2f}", f"{predicted / peak - 1:+.2%}") if predicted else ("",) * 2
        rows.append((name, f"{peak / 2**20:.2f}", f"{peak / lower:.3f}", *told,
                     f"{statistics.median(times[name]) * 1e3:.0f}", f"{found[name]['first']:.1f}"))
    print(tabulate(rows, HEADERS, disable_numparse=True, stralign="right"))
    print("peak: parameters, gradients, optimizer state and batch included, exact to the byte")
    if svg is not None:
        steps = {name: list(enumerate(each["live"])) for name, each in found.items()}  # a busy machine's pauses left out
        draw(steps, svg, budget_bytes, "Memory over one step, change by change, measured")
        print(f"drawn: {svg}")


def _has_compiler() -> bool:
    from .backends.inductor import compiler_available

    return compiler_available()


class _Worker:
    """A command in another process, answering with JSON lines."""

    def __init__(self, command: list[str], cache: str) -> None:
        self.command = command
        self.process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})

    def ask(self) -> Any:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(("{", "[")):  # Else a note for people.
                return json.loads(line)
        raise MemoptError(f"a measurement ended with status {self.process.wait()}",
                          where=" ".join(self.command), do="run that command to see why")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # Closes stdin, which ends it.
