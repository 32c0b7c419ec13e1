"""Bytes that the update of one parameter in ZeRO's third stage holds beside state and gradient, on each of two ranks.

    OMP_NUM_THREADS=1 python tests/zero/update_bytes.py [--elements 8388608] [--only CAME] [--lowering inductor]

The parameter has 1024 elements a row, in float32, or bfloat16 with `weight_bits` (w). A captured step is given the
gradient of the rows that are here, and makes that of a small parameter by itself. (In stages 1 and 2 the new values
are gathered behind the update, which holds more.) Predicted bytes are those of rank 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "optim")]

import torch  # noqa: E402
from cases import peaks  # noqa: E402
from ranks import on_ranks  # noqa: E402
from temporaries import MAKERS  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import records  # noqa: E402

WIDTHS = [(32, None), (8, None), (4, None), (1, None), (32, 32), (8, 32)]


def held(rank: int, ranks: int, name: str, elements: int, bits: int = 32, weight_bits: int | None = None,
         lowering: str = "eager") -> tuple[int, int]:
    """Predicted and measured, here."""
    torch._dynamo.reset()
    dtype = torch.float32 if weight_bits is None else torch.bfloat16
    model = nn.ParameterList([torch.randn(elements // 1024, 1024).to(dtype), torch.randn(ranks).to(dtype)])
    opt = MAKERS[name](model.parameters(), state_bits=bits, weight_bits=weight_bits)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=3)
    large, _ = model.parameters()

    def step(grad):
        model[1].sum().backward()
        large.grad = grad
        opt.step()
        opt.zero_grad()

    run = torch.compile(step, backend="memopt", options={"zero": 3, "lowering": lowering})
    grad = large.detach().clone()
    run(grad)
    resident = memopt.measure(lambda: None, resident=(model, opt, grad)).resident_bytes
    measured = min(peaks(run, [(grad,)] * 3, (model, opt, grad)))
    return records.compilations(step.__code__)[-1].predicted_peak_bytes - resident, measured - resident


def table(rank: int, ranks: int, names: list[str], elements: int, lowering: str) -> list[list[tuple[int, int]]]:
    return [[held(rank, ranks, name, elements, *width, lowering) for width in WIDTHS] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=["AdamW", "CAME", "Adafactor"])
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="eager")
    given = parser.parse_args()
    print(f"MiB beside parameter, gradient and state; {given.elements} elements on two ranks: predicted, measured")
    print("optimizer " + "".join(f"{f'{bits} bits' + (f', w {w}' if w else ''):>16}" for bits, w in WIDTHS))
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(2, Path(folder), table, 2, given.only, given.elements, given.lowering)[0]
    for name, row in zip(given.only, found):
        print(f"{name:10}" + "".join(f"{f'{p / 2**20:.2f}, {m / 2**20:.2f}':>16}" for p, m in row))


if __name__ == "__main__":
    main()
