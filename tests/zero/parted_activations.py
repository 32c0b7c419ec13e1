"""What ZeRO's P_a adds to recomputation: a transformer on tensor-parallel ranks, under budgets.

    python tests/zero/parted_activations.py
    python tests/zero/parted_activations.py --measure

The first plans for 8 ranks in one process, for each budget with and without `partition_activations`. The
second trains a smaller one on 2 gloo ranks within half of its transient bytes and less, and measures.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memopt_compile as memopt
from memopt_compile import records

SHARES = (0.6, 0.5, 0.4, 0.3, 0.25)  # of what the step holds beyond its inputs without a budget


class Block(nn.Module):
    """Attention and MLP. Queries, keys and values are of this rank's heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        q, k, v = (part(h).unflatten(-1, (-1, 32)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


def made(mesh: Any, layers: int, width: int, rows: int, length: int) -> tuple:
    """(step, its arguments, model and optimizer)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 256))
    wide = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in model[:-1]:
        parallelize_module(block, mesh, {**wide, "out": RowwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, (torch.randn(rows, length, width), torch.zeros(rows, length, dtype=torch.int64)), (model, opt)


def plan() -> None:
    with memopt.planned_ranks(8) as mesh:
        step, args, _ = made(mesh, layers=8, width=1024, rows=8, length=512)
        plain = memopt.explain(step, *args, lowering="eager")
        resident = plain.resident_bytes
        budgets = [resident + int(share * (plain.predicted_peak_bytes - resident)) for share in SHARES]
        for parts in (False, True):
            print(f"partition_activations={parts}")
            print(memopt.explain(step, *args, lowering="eager", memory_budget=budgets,
                                 partition_activations=parts))


def measured(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/found", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plain: Any = None
    first: list[float] = []
    for share, parts in [(None, False), *((share, parts) for share in SHARES for parts in (False, True))]:
        step, args, resident = made(mesh, layers=6, width=128, rows=4, length=128)
        options = {} if share is None else {"partition_activations": parts, "memory_budget": (
            plain.after.resident_bytes + int(share * plain.after.transient_peak_bytes))}
        run = memopt.compile(step, lowering="eager", **options)
        try:
            losses = [float(run(*args)) for _ in range(3)]
        except memopt.InfeasibleBudget as refusal:
            said = f"refused, {str(refusal).split(' and the budget')[0]}"
        else:
            peaks = [memopt.measure(run, *args, resident=resident).peak_bytes for _ in range(3)]
            record = records.compilations(step.__code__)[-1]
            plain, first = (record, losses) if share is None else (plain, first)
            off = max(abs(a / b - 1) for a, b in zip(losses, first))
            said = f"predicted {record.after.peak_bytes:,} measured {min(peaks):,}, losses off by {off:.1g}"
            passes = [p.name for p in record.passes if p.name == "chunk_logits" and p.op_changes]
            said += "".join(f", {name}" for name in passes)
        if rank == 0:
            print(f"{share} parts={parts}: {said}", flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(measured, (str(Path(folder)),), nprocs=2)
    else:
        warnings.simplefilter("ignore")
        plan()
