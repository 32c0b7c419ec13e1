"""What plans take of one core: six models, several budgets each and the smallest peak, as a table.

    python tests/coverage/planning.py [--only NAME ...] [--compress int4] [--lowering inductor]
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import budget
from tabulate import tabulate

import memopt_compile as memopt
from memopt_compile.planning import planner
from memopt_compile.planning.rematerialization import Problem

SHARES = (0.9, 0.7, 0.5)
NEAR = (1.01, 1.02)  # times the smallest peak, which is known then


class _Found(Exception):
    """The problem is there; what would be done with it is not wanted."""


def problem(name: str, compress: str | None, lowering: str) -> tuple[Problem, Any]:
    """What the planner is asked about the step of a model, and the groups of its operators."""
    def asked(found: Problem, limit: int, groups: Any, at_most: float) -> None:
        raise _Found(found, groups)

    step, batch, _ = budget.make_step(name)
    with mock.patch.object(planner, "cheapest", asked):
        try:
            memopt.explain(step, *batch, lowering=lowering, compress=compress, memory_budget=0.5)
        except memopt.MemoptError as error:
            return error.__cause__.args
    raise AssertionError("the step fits")


def planned(found: Problem, limit: int, groups: Any) -> str:
    """Seconds of the processor, and what the plan adds and is proved within."""
    start = time.process_time()
    plan = planner.cheapest(found, limit, groups)
    return f"{time.process_time() - start:.1f}" + (f" ({plan.gap:.1%}, {1e3 * plan.seconds:.2f} ms)" if plan else " (none)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(budget.MODELS), choices=list(budget.MODELS))
    parser.add_argument("--compress", choices=("int8", "int4", "auto"))
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    given = parser.parse_args()
    rows = []
    for name in given.only:
        found, groups = problem(name, given.compress, given.lowering)
        peak = max(found.live)
        start = time.process_time()
        least = planner.smallest(found, groups).peak_bytes
        seconds = time.process_time() - start
        near = [planned(found, int(factor * least), groups) for factor in NEAR]
        taken = []
        for share in SHARES:
            planner._found.clear()  # a plan may come of the smallest's
            taken.append(planned(found, int(share * peak), groups))
        again = {g for g, o in zip(groups, found.operations) if o.again}
        rows.append([name, len(found.order), len(again) + sum(bool(v.packed) for v in found.values),
                     f"{seconds:.1f} ({least / peak:.3f})", *taken, *near])
        print(tabulate(rows[-1:], tablefmt="plain"), flush=True)
    head = ["model", "operators", "decisions", "smallest (share)", *(f"{s} (gap)" for s in SHARES), *(f"{f} x smallest" for f in NEAR)]
    print(tabulate(rows, head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
