"""The zoo's page: a table whose rows are read back, so that a run adds to what others have found.

What the page counts is counted from the table that it shows.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import check
from run import number, share

HEAD = ("model", "task", "right", "difference", "captured", "predicted peak", "its error", "peak / eager", "budget", "remarks")
EAGER = "eager: "  # what the error of a row begins with that is left out
LEFT_OUT = "## Left out"
NO_END = "no end in "  # of a model that took longer than it may
_FOLDERS = re.compile(r"/\S+/(?=[\w.]+\.py)")
_TYPED = re.compile(r"^- (.+) \(\d+\): (.+)$")


@dataclass
class Found:
    """Cells of each model, and why others are left out, both by name and in the order in which they were tried."""

    rows: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, task: str, row: check.Row, budget: str) -> None:
        """Take this row in place of what was known of its model."""
        self.rows.pop(row.name, None)
        self.left_out.pop(row.name, None)
        if row.error.startswith(EAGER):
            self.left_out[row.name] = row.error.removeprefix(EAGER).split(":")[0]
        else:
            self.rows[row.name] = cells(task, row, budget)


def cells(task: str, row: check.Row, budget: str) -> list[str]:
    remarks = [row.error, f"differs in `{row.where}`" if row.difference is not None and not row.right else "",
               "" if row.whole else "; ".join(row.reasons[:1]), "" if row.said or row.error else f"{row.warnings} lines said so",
               "peak above eager's" if row.peak > row.eager_peak else "", row.note.strip("; ")]
    return [row.name, task, "yes" if row.right else "**no**",
            number(row.difference) + (" (float32)" if row.dtype == "float32" else ""),
            ("whole" if row.step_graphs == 1 else f"whole, {row.step_graphs} graphs") if row.whole else "ordinary path",
            f"{row.predicted:,}" if row.predicted else "-", share(row.prediction_error),
            f"{row.peak / row.eager_peak:.3f}" if row.peak else "-", budget, _FOLDERS.sub("", "; ".join(r for r in remarks if r))]


def read(page: str) -> Found:
    """What a page of `write`'s says."""
    table, _, rest = page.partition(LEFT_OUT)
    found = Found()
    for line in table.splitlines():
        row = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(row) == len(HEAD) and row[0] != HEAD[0] and not row[0].startswith("---"):
            found.rows[row[0]] = row
    for typed in filter(None, map(_TYPED.match, rest.splitlines())):
        found.left_out |= dict.fromkeys(typed[2].split(", "), typed[1])
    return found


def known(path: Path | None) -> Found:
    return read(path.read_text()) if path and path.exists() else Found()


def write(found: Found, header: str) -> str:
    lines = [header, totals([dict(zip(HEAD, row, strict=True)) for row in found.rows.values()])]
    lines += ["", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in found.rows.values()]
    lines += ["", f"{LEFT_OUT}: {len(found.left_out)}", "",
              "Tiny configurations or inputs that do not train in eager, by the error.", ""]
    reasons: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"- {reason} ({len(n)}): {', '.join(n)}" for reason, n in sorted(reasons.items(), key=lambda r: -len(r[1]))]
    return "\n".join(lines) + "\n"


def totals(rows: list[dict[str, str]]) -> str:
    """The totals of the table, misses first."""
    right, whole = ([r for r in rows if of(r)] for of in (lambda r: r["right"] == "yes", lambda r: r["captured"] != "ordinary path"))
    lines = [f"- {len(right)} of {len(rows)} right; {len(whole)} captured whole, the rest by the ordinary path."]
    slow = [r for r in rows if r["remarks"].startswith(NO_END)]
    named = {"Not right": [r for r in rows if r not in right + slow], "No end in time": slow,
             "Not whole": [r for r in rows if r not in whole + slow]}
    lines += [f"- {said}: {', '.join(r['model'] for r in of)}." for said, of in named.items() if of]
    differences = [(float(r["difference"].split()[0]), r) for r in right if r["difference"] != "-"]
    if differences:
        largest, row = max(differences, key=lambda d: d[0])
        single = ", float32" * ("float32" in row["difference"])
        lines.append(f"- Largest difference among the right ones: {number(largest)} ({row['model']}{single}).")
    errors = [(abs(float(r["its error"].rstrip("%"))) / 100, r["model"]) for r in rows if r["its error"] != "-"]
    if errors:
        largest, model = max(errors, key=lambda e: e[0])
        lines.append(f"- Predicted against measured peak: median error {median(e for e, _ in errors):.1%}, largest {largest:.1%}"
                     + f" ({model})" * (largest > 0) + ".")
    shares = [float(r["peak / eager"]) for r in rows if r["peak / eager"] != "-"]
    if shares:
        above = [r["model"] for r in rows if "peak above eager's" in r["remarks"]]
        lines.append(f"- memopt's peak as a share of eager's: median {median(shares):.3f}, from {min(shares):.3f} to "
                     f"{max(shares):.3f}; above eager's: {', '.join(above) or 'none'}.")
    budgets = Counter("not as said" if r["budget"].startswith("**") else r["budget"] for r in rows if r in whole)
    del budgets["-"]
    return "\n".join([*lines, "- Budget: " + (", ".join(f"{n} {b}" for b, n in budgets.most_common()) or "none tried") + "."])
