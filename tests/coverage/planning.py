"""What plans take of one core: six models, several budgets each and the smallest peak, as a table.

    python tests/coverage/planning.py [--only NAME ...] [--compress int4]
    python tests/coverage/planning.py --whole [--only NAME ...]
                                    all passes: without a budget, with one, and until one is refused
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any
from unittest import mock

import budget
from tabulate import tabulate

import memopt_compile as memopt
from memopt_compile import explaining, planner
from memopt_compile.rematerialization import Problem

SHARES = (0.9, 0.7, 0.5)


class _Found(Exception):
    """The problem is there; what would be done with it is not wanted."""


def problem(name: str, compress: str | None) -> tuple[Problem, Any]:
    """What the planner is asked about the step of a model, and the groups of its operators."""
    def asked(found: Problem, limit: int, groups: Any) -> None:
        raise _Found(found, groups)

    step, batch, _ = budget.make_step(name)
    with mock.patch.object(planner, "cheapest", asked):
        try:
            memopt.explain(step, *batch, lowering="eager", compress=compress, memory_budget=0.5)
        except memopt.MemoptError as error:
            return error.__cause__.args
    raise AssertionError("the step fits")


def whole(name: str) -> list[str]:
    """Seconds of one core that capture takes, and all passes behind it for several budgets."""
    def spent(**options: Any) -> tuple[Any, float]:
        step, batch, _ = budget.make_step(name)
        start, found = time.process_time(), None
        with contextlib.suppress(memopt.InfeasibleBudget):
            found = explaining.planned(step, batch, {"lowering": "eager", **options})
        return found, time.process_time() - start

    step, batch, _ = budget.make_step(name)
    start = time.process_time()
    record = explaining.planned(step, batch, {"lowering": "eager"}, captured_only=True)
    capture = time.process_time() - start
    resident, beyond = record.before.resident_bytes, record.before.transient_peak_bytes
    budgets = [None, *(resident + int(share * beyond) for share in (0.7, 0.5)), resident + 1]
    planned = [spent(memory_budget=size) for size in budgets]
    return [name, str(len(record.captured.graph.nodes)), f"{capture:.1f}",
            *(f"{seconds - capture:.1f}" + (" (refused)" if found is None else "") for found, seconds in planned)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(budget.MODELS), choices=list(budget.MODELS))
    parser.add_argument("--compress", choices=("int8", "int4", "auto"))
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    if given.whole:
        head = ["model", "nodes", "capture", "no budget", "0.7", "0.5", "the inputs and a byte"]
        print(tabulate([whole(name) for name in given.only], head, tablefmt="github", disable_numparse=True))
        return
    rows = []
    for name in given.only:
        found, groups = problem(name, given.compress)
        peak, taken = max(found.live), []
        for share in SHARES:
            start = time.process_time()
            plan = planner.cheapest(found, int(share * peak), groups)
            taken.append(f"{time.process_time() - start:.1f}" + (f" ({plan.gap:.1%})" if plan else " (none)"))
        start = time.process_time()
        least = planner.smallest(found, groups)
        again = {g for g, o in zip(groups, found.operations) if o.again}
        rows.append([name, len(found.order), len(again) + sum(bool(v.packed) for v in found.values), *taken,
                     f"{time.process_time() - start:.1f} ({least.peak_bytes / peak:.3f})"])
        print(tabulate(rows[-1:], tablefmt="plain"), flush=True)
    head = ["model", "operators", "decisions", *(f"{s} (gap)" for s in SHARES), "smallest (share)"]
    print(tabulate(rows, head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
