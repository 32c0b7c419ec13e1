"""Budgets of any model: each step captured once, planned and run for several shares of its peak, as a table.

    python tests/coverage/shares.py [--only NAME ...] [--shares 0.9 ...] [--compress int4]

Hugging Face's architectures (deeper and with larger batches than in `models.py`) and those of `nets.py`, on the eager
lowering. Each budget is kept, or refused with a smallest peak that is then tried itself. Everything the step changes is
held against the same step without a budget, from the same random numbers, and that against eager.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import check
import models
import nets
import torch
from check import Case, largest_difference, plain
from tabulate import tabulate

import memopt_compile as memopt
from memopt_compile import data_sizes, programs
from memopt_compile.backends import eager
from memopt_compile.costs import workspace
from memopt_compile.liveness import timeline
from memopt_compile.options import parse_bytes
from memopt_compile.programs import fitted
from memopt_compile.records import Compilation
from memopt_compile.step_graph import StepGraph

SHARES = (0.9, 0.8, 0.7, 0.6)
HEAD = ("model", "share", "budget, MiB", "predicted", "measured", "verdict", "added, ms", "difference", "planned in, s")
ALIKE = 1e-9  # relative difference of a step in double precision from the one without a budget
DEEP = {"num_hidden_layers": 6, "n_layer": 6, "n_layers": 6, "num_layers": 4, "encoder_layers": 4, "decoder_layers": 4}


def deepened(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with more layers, also those of the models inside."""
    return {k: DEEP.get(k, deepened(v) if isinstance(v, dict) else v) for k, v in settings.items()}


def hugging_face(name: str) -> check.Training:
    kind, settings, inputs = models.ARCHITECTURES[name]
    with mock.patch.multiple(models, BATCH=8, LENGTH=32), mock.patch.dict(
            models.ARCHITECTURES, {name: (kind, deepened(settings), inputs)}):
        return models.build(name)


def cases() -> dict[str, Case]:
    found = [Case(n, partial(nets.build, n)) for n in nets.NETS] + [
        Case(n, partial(hugging_face, n), torch.float32 if n in models.SINGLE else torch.float64)
        for n in models.ARCHITECTURES]
    return {case.name: case for case in found}


@dataclass
class Tried:
    """What came of one budget. Bytes are of the whole step."""

    share: float
    budget: int
    predicted: int | None = None
    measured: int | None = None
    added: float = 0.0
    difference: float | None = None
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    refused: bool = False

    def row(self, name: str) -> list[str]:
        def mib(size: int | None) -> str:
            return "" if size is None else f"{size / 2**20:.3f}"

        verdict = "; ".join(self.wrong) or ("refused, the smallest works" if self.refused else "kept")
        return [name, f"{self.share:.2f}", mib(self.budget), mib(self.predicted), mib(self.measured), verdict,
                f"{1e3 * self.added:.3f}", "" if self.difference is None else f"{self.difference:.0e}",
                f"{self.seconds:.1f}"]


def outcome(run: Callable, inputs: Sequence[Any]) -> list[Any]:
    """Results and what the inputs are then, of `run` from copies of `inputs`."""
    given = [plain(v) for v in inputs]
    torch.manual_seed(7)
    results = run(list(given))
    return [plain(list(results)), plain(given)]


def tried(step: StepGraph, record: Compilation, inputs: Sequence[Any], expected: list, share: float, budget: int,
          before: Tried | None, refused: bool = False) -> Tried:
    """`step` planned for `budget` and run once from `inputs`."""
    found = Tried(share, budget, refused=refused)
    trial = replace(record, options=replace(record.options, memory_budget=budget), heads={}, texts={}, versions={})
    start = time.process_time()
    try:
        run = fitted(step.copy(), trial)
    except memopt.InfeasibleBudget as refusal:
        seconds = time.process_time() - start
        if refused:
            found.wrong.append("THE SMALLEST PEAK IS REFUSED")
            return found
        smallest = parse_bytes(re.search(r"raise memory_budget to ([0-9.]+ \w+)", refusal.do)[1])
        found = tried(step, record, inputs, expected, share, smallest, before, refused=True)
        found.seconds = max(seconds, found.seconds)
        if smallest <= budget:
            found.wrong.append("REFUSED THOUGH IT FITS")
        return found
    found.seconds = time.process_time() - start
    got = outcome(run, inputs)
    found.predicted, found.measured = trial.predicted_peak_bytes, trial.measured_peak_bytes
    found.added = trial.step.plan.seconds if trial.step.plan else 0.0
    found.difference, where = largest_difference(expected, got)
    exact = not (trial.step.plan and trial.step.plan.largest_error)
    off = found.predicted / found.measured - 1  # sizes that only the data tell are counted at their largest
    checks = (
        (found.measured > budget, f"BUDGET BROKEN by {found.measured - budget}"),
        (exact and not found.difference <= ALIKE, f"NUMBERS DIFFER at {where}"),
        (not -0.01 <= off <= (9.0 if data_sizes.are_in(step.graph) else 0.01), f"PREDICTED {off:+.1%}"),
        (before is not None and found.measured > (before.measured or 0), "LARGER PEAK THAN A LARGER BUDGET'S"),
        (before is not None and found.added < before.added * 0.99, "FASTER THAN A LARGER BUDGET"),
        (found.seconds > 30, "SLOW PLANNING"))
    found.wrong += [text for wrong, text in checks if wrong]
    return found


def climbing(found: list[Tried], shares: Sequence[float], compress: str | None) -> Callable:
    """In place of `programs.fitted`: a captured step tries its budgets on the inputs of its first call, then runs."""

    def climbed(step: StepGraph, record: Compilation) -> Callable:
        captured, real = step.copy(), fitted(step, record)
        peak = timeline(captured, workspace(captured, "eager")).peak_bytes
        record = replace(record, options=replace(record.options, memory_budget=0.5, compress=compress))

        def run(inputs: list) -> Any:
            if found or not shares:
                return real(inputs)
            given = [plain(v) for v in inputs]
            random = torch.get_rng_state()
            reference = outcome(eager.lower(captured.copy()), given)
            for share in shares:
                if not found or not found[-1].refused:
                    found.append(tried(captured, record, given, reference, share, int(share * peak),
                                       found[-1] if found else None))
            torch.set_rng_state(random)
            del given, reference
            return real(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return torch.compiler.disable(run)

    return climbed


def ladder(case: Case, shares: Sequence[float], compress: str | None) -> list[Tried]:
    """The budgets of one model, and how far its step without one is from eager."""
    expected, _ = check.train(replace(case, steps=1))
    found: list[Tried] = []
    check.forget()
    with (mock.patch.object(programs, "fitted", climbing(found, shares, compress)),
          mock.patch.object(check, "MEASURED", -1)):  # no step is: budgets are measured within it
        got, _ = check.train(replace(case, steps=1), lambda step: memopt.compile(step, lowering="eager"))
    off, where = largest_difference(expected, got)
    if not found:
        found.append(Tried(1.0, 0, wrong=["NOT CAPTURED WHOLE"]))
    if off > (case.tolerance or check.TOLERANCE[case.dtype]):
        found.append(Tried(1.0, 0, difference=off, wrong=[f"NOT EAGER'S at {where}"]))
    return found


def table_of(given: argparse.Namespace, name: str) -> list[list[str]]:
    try:
        return [each.row(name) for each in ladder(cases()[name], given.shares, given.compress)]
    except Exception as error:
        return [Tried(1.0, 0, wrong=[check.describe(error)]).row(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = cases()
    parser.add_argument("--only", nargs="*", default=list(known), choices=list(known))
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--compress", choices=("int8", "int4", "auto"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a process for each
        for rows in pool.imap(partial(table_of, given), given.only, chunksize=1):
            table += rows
            print(*map("\t".join, rows), sep="\n", file=sys.stderr, flush=True)
    print(tabulate(table, HEAD, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
