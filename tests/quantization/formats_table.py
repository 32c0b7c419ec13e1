"""The formats of activations as a table: bytes, error, and bytes held while they run.

    python tests/quantization/formats_table.py
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from tabulate import tabulate
from torch import Tensor

from memopt_compile.compression import compress, decompress, layout
from memopt_compile.measure import measure
from memopt_compile.quantization.activations import FORMATS


def cells(form: str, value: Tensor) -> list[str]:
    """Share of the bytes, share of the norm that is lost, and the most that either operator holds."""
    parts = compress(value, form)
    back = decompress(parts, form, *layout(value))
    error = float((back.double() - value.double()).norm() / value.double().norm())
    held = [measure(run, resident=()) for run in (
        lambda: compress(value, form), lambda: decompress(parts, form, *layout(value)))]
    beside = max(m.transient_peak_bytes - m.end_bytes for m in held)
    return [f"{sum(p.nbytes for p in parts) / value.nbytes:.3f}",
            f"{error:.1%}" if FORMATS[form].restores else "", f"{beside / 2**20:.2f}"]


def main() -> None:
    torch.manual_seed(0)
    normal = torch.randn(4096, 4096)
    rows = []
    for form in FORMATS:
        if "index" in form:
            rows.append([form, "int64", *cells(form, (normal.abs() * 40).clamp(max=200).long())])
        elif "mask" in form:
            rows.append([form, "bool", *cells(form, normal > 0)])
        else:
            value = normal.softmax(-1) if "offset" in form else normal
            for dtype in (torch.bfloat16, torch.float32):
                rows.append([form, str(dtype).split(".")[1], *cells(form, value.to(dtype))])
    print(tabulate(rows, ["format", "of", "of its bytes", "error", "held beside, MiB"],
                   tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
