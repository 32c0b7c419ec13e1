"""All formats as a table: bytes, error, and bytes held while they run.

    python tests/quantization/formats_table.py
"""

import os
from functools import partial

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from tabulate import tabulate
from torch import Tensor

from memopt_compile.compression import compress, decompress, layout
from memopt_compile.measure import measure
from memopt_compile.quantization.activations import Packing
from memopt_compile.quantization.named import FORMATS
from memopt_compile.quantization.operators import DEQUANTIZE, QUANTIZE


def cells(name: str, value: Tensor) -> list[str]:
    """Share of the bytes, share of the norm that is lost, and the most that either operator holds."""
    form = FORMATS[name]
    if isinstance(form, Packing):
        encode = partial(compress, value, name)
        decode = partial(decompress, encode(), name, *layout(value))
    else:
        kind = (form.map, form.bits, form.block)
        encode = partial(QUANTIZE, value, torch.tensor(0), *kind, None)
        decode = partial(DEQUANTIZE, encode(), *kind, list(value.shape), value.dtype)
    error = float((decode().double() - value.double()).norm() / value.double().norm())
    held = [measure(run, resident=()) for run in (encode, decode)]
    beside = max(m.transient_peak_bytes - m.end_bytes for m in held)
    return [f"{sum(p.nbytes for p in encode()) / value.nbytes:.3f}",
            f"{error:.1%}" if getattr(form, "restores", True) else "", f"{beside / 2**20:.2f}"]


def main() -> None:
    torch.manual_seed(0)
    normal = torch.randn(4096, 4096)
    rows = []
    for name, form in FORMATS.items():
        if "index" in name:
            rows.append([name, "int64", *cells(name, (normal.abs() * 40).clamp(max=200).long())])
        elif "mask" in name:
            rows.append([name, "bool", *cells(name, normal > 0)])
        else:
            value = normal.square() if "unsigned" in name else normal.softmax(-1) if "offset" in name else normal
            for dtype in (torch.bfloat16, torch.float32)[not isinstance(form, Packing):]:
                rows.append([name, str(dtype).split(".")[1], *cells(name, value.to(dtype))])
    print(tabulate(rows, ["format", "of", "of its bytes", "error", "held beside, MiB"],
                   tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
