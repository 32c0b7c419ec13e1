"""Hold memopt against eager on published models, modules and optimizers, and print a table.

    python tests/coverage/run.py [--only hf|modules|optimizers] [--names ...]
                                 [--write docs/results/coverage.md]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # each measurement would print two lines
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "capture")]

import check  # noqa: E402
import torch  # noqa: E402

SETS = {"hf": "Hugging Face architectures", "optimizers": "Optimizers (`optim_db`)",
        "modules": "Modules (`module_db`)"}


def cases(which: str) -> list[check.Case]:
    if which == "hf":
        import models
        return models.cases()
    if which == "optimizers":
        import optimizer_cases
        return optimizer_cases.cases()
    import module_cases
    return module_cases.cases()


def line(row: check.Row) -> str:
    """One case for the terminal."""
    state = "ERROR" if row.error else "right" if row.right else "WRONG"
    whole = "whole" if row.whole else f"{row.step_graphs}+{row.other_graphs} graphs"
    parts = [f"{row.name:45s} {state} {number(row.difference)} {whole:12s}"]
    if row.predicted:
        parts.append(f"predicted {share(row.prediction_error)} (transient {share(row.transient_error)})")
    if row.peak:
        parts.append(f"peak {row.peak / row.eager_peak:.3f} of eager")
    parts.append(f"{row.seconds:.1f} s")
    if not row.right:
        parts.append(row.error or row.where)
    if not row.said:
        parts.append(f"{row.warnings} lines said so")
    return "  ".join(parts + row.reasons[:1])


def number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def table(rows: list[check.Row]) -> str:
    """The cases of one set in Markdown."""
    lines = ["| case | right | largest difference | captured | predicted peak | its error | "
             "transient error | memopt / eager peak | remarks |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row.name, "yes" if row.right else "**no**",
                 number(row.difference) + (f" ({row.dtype})" if row.dtype != "float64" else ""),
                 "whole" + (f", {row.step_graphs} graphs" if row.step_graphs > 1 else "")
                 if row.whole else "**ordinary path**",
                 f"{row.predicted:,}" if row.predicted else "-", share(row.prediction_error),
                 share(row.transient_error),
                 f"{row.peak / row.eager_peak:.3f}" if row.peak else "-", remarks(row)]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def remarks(row: check.Row) -> str:
    found = [row.note, row.error]
    if row.difference is not None and not row.right:
        found.append(f"differs in `{row.where}`")
    if not row.whole:
        found += row.reasons[:1]
    if not row.said and not row.error:
        found.append(f"{row.warnings} lines said so instead of one")
    if row.peak > row.eager_peak:
        found.append("peak above eager's")
    return "; ".join(f.strip("; ") for f in found if f)


def summary(rows: list[check.Row]) -> str:
    """The totals of one set, misses first."""
    right, whole = [r for r in rows if r.right], [r for r in rows if r.whole]
    above = [r for r in rows if r.peak > r.eager_peak]
    errors = sorted((abs(r.prediction_error), r.name) for r in rows if r.prediction_error is not None)
    transient = sorted((abs(r.transient_error), r.name) for r in rows if r.transient_error is not None)
    lines = [f"- {len(right)} of {len(rows)} right; {len(whole)} captured whole, "
             f"the rest by the ordinary path."]
    missed = [r.name for r in rows if not r.right]
    if missed:
        lines.append(f"- Not right: {', '.join(missed)}.")
    split = [r.name for r in rows if not r.whole]
    if split:
        lines.append(f"- Not whole: {', '.join(split)}.")
    silent = [r.name for r in rows if not r.said and not r.error]
    if silent:
        lines.append(f"- Not whole without exactly one line in the log: {', '.join(silent)}.")
    worst = max((r for r in right), key=lambda r: r.difference, default=None)
    if worst:
        lines.append(f"- Largest difference among the right ones: {number(worst.difference)} "
                     f"({worst.name}, {worst.dtype}).")
    if errors:
        lines.append(f"- Predicted against measured peak: median error {errors[len(errors) // 2][0]:.1%}, "
                     f"largest {errors[-1][0]:.1%} ({errors[-1][1]}); of the transient part "
                     f"{transient[len(transient) // 2][0]:.1%} and {transient[-1][0]:.1%} "
                     f"({transient[-1][1]}).")
    ratios = sorted(r.peak / r.eager_peak for r in rows if r.peak)
    if ratios:
        lines.append(f"- memopt's peak as a share of eager's: median {ratios[len(ratios) // 2]:.3f}, "
                     f"from {ratios[0]:.3f} to {ratios[-1]:.3f}; above eager's: "
                     + (", ".join(f"{r.name} ({r.peak / r.eager_peak:.3f})" for r in above) or "none") + ".")
    return "\n".join(lines)


HEADER = """# Coverage

Generated by `python tests/coverage/run.py --write docs/results/coverage.md` with torch {torch}
on a CPU. Each case trains {steps} steps in eager and again under `backend="memopt"` with the eager
lowering, from equal seeds; losses, parameters, buffers, gradients, optimizer state and the random
state are compared. *Right* means the largest relative difference of any tensor is at most 1e-9 in
float64 (1e-5 where float32 is said, and the bound of its own that a remark names). *Whole* means one
graph holds forward, backward and update. One of the 38 architectures is there twice, with another loss.

The predicted peak is memopt's own, in bytes of the whole step with parameters and state; its error
is against the bytes measured on the graph's first run, in total and for what the step adds to its
inputs. The last ratio is the measured peak of the step (its fourth run) against eager's.
"""


def report(results: dict[str, list[check.Row]], old: str = "") -> str:
    """The page, with the sections of `old` for the sets that were not run."""
    kept = {text.splitlines()[0]: text for text in old.split("\n## ")[1:]}
    parts = [HEADER.format(torch=torch.__version__, steps=check.STEPS)]
    for which, title in SETS.items():
        if results.get(which):
            parts.append(f"## {title}\n\n{summary(results[which])}\n\n{table(results[which])}\n")
        elif title in kept:
            parts.append(f"## {kept[title].rstrip()}\n")
    return "\n".join(parts)


def run(place: tuple[str, str]) -> check.Row:
    which, name = place
    return check.run(next(case for case in cases(which) if case.name == name))


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--names", nargs="+", default=[], help="cases that contain one of these")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--write", type=Path, help="keep the tables in this file; those of other sets stay")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, list[check.Row]] = {}
    start = time.perf_counter()
    for which in given.only or SETS:
        rows = results.setdefault(which, [])
        wanted = [(which, c.name) for c in cases(which)
                  if not given.names or any(name in c.name for name in given.names)]
        # A process for each case: what Dynamo learns of one would slow down the next.
        with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
            for i, row in enumerate(pool.imap(run, wanted), 1):
                rows.append(row)
                print(f"[{i}/{len(wanted)}] {line(row)}", flush=True)
                if given.write:
                    given.write.parent.mkdir(parents=True, exist_ok=True)
                    old = given.write.read_text() if given.write.exists() else ""
                    given.write.write_text(report(results, old))
        print(f"\n{SETS[which]}\n{summary(rows)}\n", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    return results


if __name__ == "__main__":
    main()
