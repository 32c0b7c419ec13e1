"""Peak bytes and bytes sent a rank: stage 3 of ours beside PyTorch's FSDP2, on the same model.

    python tests/zero/beside_fsdp2.py --ranks 2

Each way starts from the same weights and trains on the same batches in the same processes, one behind
the other. FSDP2 shards every block and the rest (`reshard_after_forward` is its stage 3; without it it
keeps parameters from forward to backward) and runs in eager. Peaks are of what PyTorch's allocator hands out in the calling thread, in both, and the
least of some steps: gloo's own thread may hold what it has sent for a moment longer. Bytes sent are counted
from the collectives that a step runs, by ring algorithms, in both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "optim"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from bytes_a_rank import MEASURED, sent_bytes  # noqa: E402
from models import GPT, GPTConfig  # noqa: E402
from ranks import on_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import records  # noqa: E402


class Sent(TorchDispatchMode):
    """Bytes that the collectives of c10d send from a rank by ring algorithms."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.share, self.bytes, self.calls = (ranks - 1) / ranks, 0.0, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            whole = max((t.nbytes for t in tensors), default=0)
            self.bytes += whole * self.share * (2 if "allreduce" in name else 1)
            self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def trained(kind: str, rank: int, ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig(96, given.layers, given.width, given.width // 32, 64))
    mesh = init_device_mesh("cpu", (ranks,))
    whole = sum(p.nbytes for p in model.parameters())
    if kind != "ours":
        for each in (*model.blocks, model):
            fully_shard(each, mesh=mesh, reshard_after_forward=kind != "FSDP2, kept")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "ours":
        memopt.shard_(model, opt, mesh, stage=3)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    run: Callable = step
    if kind == "ours":
        run = torch.compile(step, backend="memopt", options={"zero": 3, "lowering": "eager"})
    batch = torch.randint(96, (1, given.tokens), generator=torch.Generator().manual_seed(rank))
    losses = [float(run(batch, batch).detach()) for _ in range(2)]
    peaks = [memopt.measure(run, batch, batch, resident=(model, opt)) for _ in range(MEASURED)]
    if kind == "ours":
        sent = sent_bytes(records.compilations(step.__code__)[-1], ranks)
    else:
        with Sent(ranks) as counted:
            step(batch, batch)
        sent = counted.bytes
    least = min(peaks, key=lambda m: m.peak_bytes)
    return {"parameters": whole, "losses": losses, "peak": least.peak_bytes,
            "resident": least.resident_bytes, "transient": least.transient_peak_bytes, "sent": sent}


def all_ways(rank: int, ranks: int, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return {kind: trained(kind, rank, ranks, given) for kind in ("ours", "FSDP2", "FSDP2, kept")}


def main() -> None:
    parser = argparse.ArgumentParser(description="ZeRO 3 beside FSDP2: bytes a rank.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(given.ranks, Path(folder), all_ways, given.ranks, given)
    print("| ranks | tokens | way | peak bytes | resident | transient | bytes sent | losses |\n"
          "|---|---|---|---|---|---|---|---|")
    for kind, first in results[0].items():
        worst = max((r[kind] for r in results), key=lambda r: r["peak"])
        print(f"| {given.ranks} | {given.tokens} | {kind} | {worst['peak']:,} | {worst['resident']:,} "
              f"| {worst['transient'] / first['parameters']:.3f} | {worst['sent']:,.0f} "
              f"| {', '.join(f'{loss:.6f}' for loss in first['losses'])} |")


if __name__ == "__main__":
    main()
