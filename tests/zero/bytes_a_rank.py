"""Bytes that each rank holds between steps and during one, in every stage, of a GPT with AdamW.

    python tests/zero/bytes_a_rank.py --ranks 2
    python tests/zero/bytes_a_rank.py --layers 4 --stages 1 2 --micro 4 [--adama]
    python tests/zero/bytes_a_rank.py --layers 4 --bits 8
    python tests/zero/bytes_a_rank.py --layers 4 --master

Prints a table: resident bytes measured beside the formulas of ZeRO's paper for float32 (with --bits for
parameters of so many, and states of 8 bits, with their scales; with --master for parameters in bfloat16,
the other 2 bytes of a float32, and states of 8 bytes), the peak of
what a step adds in units of the parameters' bytes (predicted and measured, the least of some steps,
since gloo's own thread may hold what it has sent a moment longer), and bytes communicated a rank in
units of data parallel's, counted in the graph, with the number of calls and of the tensors in them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "optim"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from cases import calls, sent  # noqa: E402
from models import GPT, GPTConfig  # noqa: E402
from ranks import on_ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import records  # noqa: E402
from memopt_compile.collectives import is_collective, whole_bytes  # noqa: E402
from memopt_compile.step_graph import op_name  # noqa: E402

MEASURED = 5  # steps


def sent_bytes(record: records.Compilation, ranks: int) -> float:
    """Bytes that a rank sends by ring algorithms: (N-1)/N of a gather's result or a scatter's operand,
    twice that of an all-reduce."""
    total = 0.0
    for node in record.step.computing():
        if is_collective(node):
            total += whole_bytes(node) * (2 if op_name(node) == "all_reduce" else 1) * (ranks - 1) / ranks
    return total


def measured(rank: int, ranks: int, stages: tuple[int, ...], layers: int, width: int, micro: int,
             accumulate: str, bits: int, master: bool) -> dict:
    found = {}
    for stage in stages:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = GPT(GPTConfig(96, layers, width, width // 32, 32)).to(torch.bfloat16 if master else torch.float32)
        whole = memopt.measure(lambda: None, resident=(model,)).by_category["parameters"]
        parameters, states = whole, 2 * whole
        if bits:
            memopt.quantize_parameters_(model, bits)
            parameters, states = ((b + 32 / 2048) / 32 * whole for b in (bits, 2 * 8 + 32 / 2048))
            opt = memopt.optim.AdamW(model.parameters(), lr=1e-3, state_bits=8)
        elif master:
            states = 5 * whole
            opt = memopt.optim.AdamW(model.parameters(), lr=1e-3, weight_bits=32)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        name, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional
        if stage:
            memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=stage)

        def step(tokens, targets, model=model, opt=opt, stage=stage, name=name, c10d=c10d):
            for xs, ys in memopt.micro_batches(micro, tokens, targets):
                loss = F.cross_entropy(model(xs).flatten(0, 1), ys.flatten()) / micro
                loss.backward()
            if not stage:
                for p in model.parameters():
                    p.grad = c10d.wait_tensor(c10d.all_reduce(p.grad, "avg", name))
            opt.step()
            opt.zero_grad()
            return loss

        run = torch.compile(step, backend="memopt", options={
            "lowering": "eager", "zero": stage, "accumulate": accumulate})
        batch = torch.randint(96, (micro, 8), generator=torch.Generator().manual_seed(rank))
        run(batch, batch)
        peaks = [memopt.measure(run, batch, batch, resident=(model, opt)) for _ in range(MEASURED)]
        record = records.compilations(step.__code__)[-1]
        resident = memopt.measure(lambda: None, resident=(model, opt)).resident_bytes
        found[stage] = {
            "parameters": whole, "resident": resident,
            "formula": (parameters if stage < 3 else parameters / ranks) + states / (ranks if stage else 1),
            "predicted": record.predicted_peak_bytes - record.after.resident_bytes,
            "measured": min(m.transient_peak_bytes for m in peaks), "sent": sent_bytes(record, ranks),
            "calls": len(calls(record)), "tensors": len(sent(record))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes a rank in every stage of ZeRO.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of one sample")
    parser.add_argument("--adama", action="store_true", help="they add up in the optimizer's states")
    parser.add_argument("--bits", type=int, default=0, help="of parameters in low precision: 8, 10 or 12")
    parser.add_argument("--master", action="store_true", help="parameters in bfloat16 with a master copy")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(given.ranks, Path(folder), measured, given.ranks, tuple(given.stages),
                           given.layers, given.width, given.micro,
                           "optimizer_states" if given.adama else "gradients", given.bits, given.master)
    print("| ranks | stage | resident bytes | formula | difference | transient, predicted | measured "
          "| communicated | calls | tensors |\n|---|---|---|---|---|---|---|---|---|---|")
    for stage in given.stages:
        ranks = [r[stage] for r in results]
        row = max(ranks, key=lambda r: r["resident"])
        unit, base = row["parameters"], results[0].get(0, row)["sent"]
        print(f"| {given.ranks} | {stage} | {row['resident']:,} | {row['formula']:,.0f} "
              f"| {row['resident'] / row['formula'] - 1:+.2%} "
              f"| {max(r['predicted'] for r in ranks) / unit:.3f} "
              f"| {max(r['measured'] for r in ranks) / unit:.3f} | {row['sent'] / base:.2f} "
              f"| {row['calls']} | {row['tensors']} |")


if __name__ == "__main__":
    main()
