"""What a caching allocator reserves for a planned step of ZeRO 3, with and without an arena.

    python tests/zero/fragmentation.py
    python tests/zero/fragmentation.py --models gpt --ranks 8 --layers 4

There is no GPU in it. One process plans the step for many ranks (`memopt.planned_ranks`), and the
allocations and frees of the plan, in its order, are given to a model of PyTorch's allocator for CUDA: parameters
and states first, then three steps with batches, all on one stream. Its rules, from torch 2.13's
c10/core/AllocatorConfig.h (sizes) and c10/cuda/CUDACachingAllocator.cpp:

1. Sizes are rounded up to 512 bytes.
2. Up to 1 MiB is served from segments of 2 MiB; what is larger from segments of 20 MiB if it is below 10 MiB, else
   from one of its own size, rounded up to 2 MiB. Small and large blocks have pools of their own.
3. The smallest free block that fits is taken, of equals the one with the lowest address. Its rest becomes a free
   block if it has 512 bytes in a small pool, or more than 1 MiB in a large one.
4. A freed block grows together with free neighbours in its segment.
5. Segments stay until one more does not fit the device. Then all that are free as a whole go back, at the price
   of waiting for the device, and if that is not enough the allocation fails.

`expandable_segments` are not modelled, and operators' workspace and collectives' own streams are not in the plan.

Printed are the bytes of the arena beside the least that its tenants need at once; the most bytes that the
plan has allocated; the most that the allocator has reserved on a device without end; what of it was never
allocated; and the smallest device on which no allocation fails. `--rise` is how far an arena may raise the predicted peak:
0.02 is what `arena=True` does, and 9 puts everything into it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[2] / "examples")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from models import GPT, GPTConfig  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import pipelines  # noqa: E402
from memopt_compile.liveness import lifetimes  # noqa: E402
from memopt_compile.passes.place_in_arena import PlaceInArena  # noqa: E402
from memopt_compile.reporting import explaining  # noqa: E402
from memopt_compile.reporting.render import Report  # noqa: E402
from memopt_compile.step_graph import Role, StepGraph  # noqa: E402

MIB = 1 << 20
SMALLEST, SMALL, LARGE_REQUEST = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB
STEPS = 3


def rounded(size: int, to: int) -> int:
    return -(-size // to) * to


class CachingAllocator:
    """Rules 1 to 5. A block is (segment, offset) of some size."""

    def __init__(self, device_bytes: float = float("inf")) -> None:
        self.device_bytes = device_bytes
        self.whole: dict[int, int] = {}  # sizes by segment
        self.reserved = self.allocated = self.most_allocated = 0
        self.segments = itertools.count()
        self.small: dict[int, bool] = {}  # by segment, which pool it is of
        self.free: dict[bool, dict[tuple[int, int], int]] = {True: {}, False: {}}  # by pool, sizes by block
        self.taken: dict[tuple[int, int], int] = {}

    def malloc(self, nbytes: int) -> tuple[int, int]:
        size = rounded(max(nbytes, 1), SMALLEST)
        small = size <= SMALL
        pool = self.free[small]
        block = min((b for b, free in pool.items() if free >= size), key=lambda b: (pool[b], b), default=None)
        if block is None:
            segment = (SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE_REQUEST
                       else rounded(size, ROUND_LARGE))
            if self.reserved + segment > self.device_bytes:
                self._give_back()
            if self.reserved + segment > self.device_bytes:
                raise MemoryError
            block = (next(self.segments), 0)
            pool[block] = self.whole[block[0]] = segment
            self.small[block[0]] = small
            self.reserved += segment
        rest = pool.pop(block) - size
        if rest >= SMALLEST if small else rest > SMALL:
            pool[block[0], block[1] + size] = rest
        else:
            size += rest
        self.taken[block] = size
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def _give_back(self) -> None:
        for pool in self.free.values():
            for block in [b for b, free in pool.items() if free == self.whole[b[0]]]:
                self.reserved -= pool.pop(block)

    def release(self, block: tuple[int, int]) -> None:
        size = self.taken.pop(block)
        self.allocated -= size
        segment, start = block
        pool = self.free[self.small[segment]]
        size += pool.pop((segment, start + size), 0)
        before = next((b for b, free in pool.items() if b[0] == segment and b[1] + free == start), None)
        if before is not None:
            size += pool.pop(before)
            start = before[1]
        pool[segment, start] = size


def events(step: StepGraph) -> Iterator[tuple[Any, int]]:
    """(owner, bytes) where the plan allocates, (owner, 0) where it frees."""
    life, order = lifetimes(step.graph), list(step.computing())
    place = {node: i for i, node in enumerate(order)}
    born, dead = defaultdict(list), defaultdict(list)
    last = dict.fromkeys(life.size, 0)
    for i, node in enumerate(order):
        last.update(dict.fromkeys(life.touched[node] & life.size.keys(), i))
    for owner, size in life.size.items():
        maker = owner if life.born[owner] else owner.args[0]  # an item is there with its tuple
        if size > 0:
            born[place[maker]].append(owner)
            dead[len(order) if owner in life.kept else max(last[owner], place[owner])].append(owner)
    for i in range(len(order) + 1):
        yield from ((owner, life.size[owner]) for owner in born[i])
        yield from ((owner, 0) for owner in dead[i])


def simulated(step: StepGraph, device_bytes: float = float("inf")) -> CachingAllocator:
    """An allocator that has served some steps.

    Raises:
        MemoryError: the device is too small for it.
    """
    allocator = CachingAllocator(device_bytes)
    batch = [i.nbytes for i in step.inputs if i.role is Role.BATCH]
    for given in step.inputs:
        if given.role is not Role.BATCH and given.nbytes:
            allocator.malloc(given.nbytes)
    for _ in range(STEPS):
        held = [allocator.malloc(size) for size in batch]
        blocks = {}
        for owner, size in events(step):
            if size:
                blocks[owner] = allocator.malloc(size)
            else:
                allocator.release(blocks.pop(owner))
        for block in held:
            allocator.release(block)
    return allocator


def smallest_device(step: StepGraph, low: int, high: int) -> int:
    """Bytes with which no allocation fails, to 2 MiB: none below was found."""
    while high - low > ROUND_LARGE:
        middle = (low + high) // 2
        try:
            simulated(step, middle)
            high = middle
        except MemoryError:
            low = middle
    return high


def gpt(layers: int) -> tuple[torch.nn.Module, int]:
    return GPT(GPTConfig(50304, layers, 1536, 16, 1024)), 50304


def llama(layers: int) -> tuple[torch.nn.Module, int]:
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_hidden_layers=layers,
        vocab_size=32000, max_position_embeddings=2048, use_cache=False)), 32000


def llama_checkpointed(layers: int) -> tuple[torch.nn.Module, int]:
    model, vocabulary = llama(layers)
    with warnings.catch_warnings(action="ignore"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(), vocabulary


MODELS = {"gpt": gpt, "llama": llama, "llama_checkpointed": llama_checkpointed}


def planned(name: str, ranks: int, layers: int, tokens: int, autocast: bool, rise: float | None) -> Any:
    with memopt.planned_ranks(ranks) as mesh:
        model, vocabulary = MODELS[name](layers)
        opt = torch.optim.AdamW(model.parameters())
        memopt.shard_(model, opt, mesh, stage=3)

        def step(ids, targets):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(ids)
            logits = getattr(logits, "logits", logits)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        ids = torch.zeros(2, tokens, dtype=torch.long)
        with mock.patch.object(pipelines, "PlaceInArena", partial(PlaceInArena, rise=rise)):
            return explaining.planned(step, (ids, ids), {"zero": 3, "arena": rise is not None, "lowering": "eager"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Reserved against allocated bytes of a planned step.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--float32", action="store_true", help="no autocast to bfloat16")
    parser.add_argument("--rise", type=float, nargs="+", default=[0.02, 9.0])
    given = parser.parse_args()
    print("| model | ranks | rise | arena | at least | predicted peak | allocated | reserved | unused | device |\n"
          "|---|---|---|---|---|---|---|---|---|---|")
    for name, ranks, rise in itertools.product(given.models, given.ranks, (None, *given.rise)):
        record = planned(name, ranks, given.layers, given.tokens, not given.float32, rise)
        found, plan = simulated(record.step), Report.of(record).arena
        sizes = [record.predicted_peak_bytes, found.most_allocated, found.reserved,
                 found.reserved - found.most_allocated,
                 smallest_device(record.step, found.most_allocated, found.reserved)]
        of_arena = [plan.nbytes, plan.lower_bound_bytes] if plan else [None] * 2
        print(f"| {name} | {ranks} | {'no arena' if rise is None else rise} | "
              + " | ".join("" if size is None else f"{size / MIB:,.1f}" for size in of_arena + sizes) + " |",
              flush=True)


if __name__ == "__main__":
    main()
