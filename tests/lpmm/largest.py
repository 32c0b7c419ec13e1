"""The largest model of RoBERTa's kind that trains in 11 GiB at batch 1, by depth and by width, planned.

    python tests/lpmm/largest.py [--ways NAME ...] [--by depth width] [--check 24]

The paper's Table 6 asks this; our text of the paper has neither its model nor its numbers. By depth the width
is 1024, as RoBERTa-Large's; by width, in steps of 64 (one more head), there are its 24 layers. One sequence of 128
tokens, Adam. Nothing is allocated: two depths are planned on fake tensors and give the others (`Plan`). `--check`
plans one depth whole besides, and prints both peaks.

"ordinary" is full precision with all gradients there before the update, as without a compiler; "LPMM's formats" are
parameters, gradients and both moments in 8 bits; memopt has no gradients, and moments of 8 or 4 bits; "checkpoints"
keep of a layer only what goes in.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import RobertaConfig, RobertaForSequenceClassification

import memopt_compile as memopt
from memopt_compile.reporting.explaining import planned
from memopt_compile.step_graph import Phase

GIB, LENGTH, WIDTH, LAYERS, HEAD = 11, 128, 1024, 24, 64
WAYS = {  # bits of parameters and of states; gradients are all there before the update, in so many bits; checkpoints
    "full precision, ordinary": (32, 32, 32, False),
    "full precision, ordinary, checkpoints": (32, 32, 32, True),
    "LPMM's formats": (8, 8, 8, False),
    "LPMM's formats, checkpoints": (8, 8, 8, True),
    "memopt 8/-/8/8": (8, 8, None, False),
    "memopt 8/-/8/8, checkpoints": (8, 8, None, True),
    "memopt 8/-/4/4": (8, 4, None, False),
    "memopt 8/-/4/4, checkpoints": (8, 4, None, True),
}


def roberta(width: int, layers: int) -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(
        vocab_size=50265, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // HEAD,
        intermediate_size=4 * width, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5))


def parameters(width: int, layers: int) -> int:
    with torch.device("meta"):
        one, two = (sum(p.numel() for p in roberta(width, count).parameters()) for count in (1, 2))
    return one + (layers - 1) * (two - one)


def maker(way: str, width: int) -> Callable[[int], tuple]:
    bits, state_bits, gradient_bits, checkpoints = WAYS[way]

    def make(layers: int) -> tuple:
        torch._dynamo.reset()
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = roberta(width, layers)
            if checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
            ids, labels = torch.randint(5, 50000, (1, LENGTH)), torch.randint(2, (1,))
            if bits == 8:
                memopt.quantize_parameters_(model, 8)
            kept = {"state_bits": state_bits, "gradient_bits": gradient_bits or 32} if bits == 8 else {}
            opt = memopt.optim.Adam(model.parameters(), **kept)

        def step(x, y):
            model(input_ids=x, labels=y).loss.backward()
            if gradient_bits == 8:
                opt.accumulate()
            elif gradient_bits:  # the norm of all gradients needs all of them
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

        return step, (ids, labels)

    return make


class Plan:
    """Peaks of all depths, from plans of 2 and 3 layers, by the lines of `memopt.explain_layers`.

    Beyond what is resident, a layer leaves so many bytes alive behind its forward (s), and so many behind its
    backward (g). So the peak of L layers is the higher of two lines: of the moments around the end of forward, while the
    activations of all layers but one are there, which rises by s (or by g, if that is more: then nothing falls behind it);
    and of the others, such as the embedding's decoding and its update, which does not rise, or by g. What has to hold if layers are alike is asserted.
    """

    def __init__(self, way: str, width: int) -> None:
        seen = []
        for depth in (2, 3):
            step, args = maker(way, width)(depth)
            after = planned(step, args, {"lowering": "eager"}).after
            live, phases = [p.live_bytes for p in after.points], [p.phase for p in after.points]
            top = max(i for i, phase in enumerate(phases) if phase is Phase.FORWARD)
            seen.append((after.resident_bytes, live, top, live[top], live[max(
                i for i, phase in enumerate(phases) if phase is not Phase.UPDATE)]))
        (resident, _, _, forward, backward), (more, live, top, forward_too, backward_too) = seen
        self.resident, self.forward, self.backward = more - resident, forward_too - forward, backward_too - backward
        peaks = []
        for _, live, top, end, _ in seen:
            lower = [i for i, size in enumerate(live) if size < end - self.forward]
            first, last = max((i for i in lower if i < top), default=-1), min((i for i in lower if i > top), default=len(live))
            peaks.append((max(live[first + 1:last]), max(*live[:first + 1], *live[last:], 0)))
        (high, low), (higher, lower) = peaks
        rise = higher - high
        slower = lower < higher and lower - low <= rise  # never the higher line
        assert rise == max(self.forward, self.backward), (peaks, vars(self))
        assert slower or lower - low in (0, self.backward), (peaks, vars(self))
        self.lines = (more + higher, self.resident + rise), (more + lower, self.resident + lower - low)

    def peak_bytes(self, layers: int) -> int:
        return max(at_three + (layers - 3) * a_layer for at_three, a_layer in self.lines)


def deepest(way: str) -> int:
    plan, layers = Plan(way, WIDTH), 3
    while plan.peak_bytes(layers + 1) <= GIB * 2**30:
        layers += 1
    return layers


def widest(way: str, width: int) -> int:
    """The width that fits where 64 more do not, from a guess."""
    fits: dict[int, bool] = {}
    while not (fits.get(width) and fits.get(width + HEAD) is False):
        peak = Plan(way, width).peak_bytes(LAYERS)
        fits[width] = peak <= GIB * 2**30
        low = max((w for w, fit in fits.items() if fit), default=HEAD)
        high = min((w for w, fit in fits.items() if not fit), default=1 << 20)
        guess = int(width * (GIB * 2**30 / peak) ** 0.5) // HEAD * HEAD  # most of it grows as the square
        width = low if high == low + HEAD else max(low + HEAD, min(guess, high - HEAD))
    return width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--by", nargs="+", choices=("depth", "width"), default=["depth", "width"])
    parser.add_argument("--check", type=int, metavar="LAYERS", help="plan this depth whole, and by the lines")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.check:
        print("| way | layers | bytes by the lines | planned whole |\n|---|---|---|---|")
        for way in given.ways:
            step, args = maker(way, WIDTH)(given.check)
            whole = planned(step, args, {"lowering": "eager"}).after
            print(f"| {way} | {given.check} | {Plan(way, WIDTH).peak_bytes(given.check):,} | "
                  f"{whole.peak_bytes:,} |", flush=True)
        return
    print("| by | way | width | layers | millions of parameters | of the first |\n|---|---|---|---|---|---|")
    for by in given.by:
        first = 0
        for way in given.ways:
            if by == "depth":
                width, layers = WIDTH, deepest(way)
            else:
                bits, state_bits, gradient_bits, _ = WAYS[way]
                a_parameter = (bits + 2 * state_bits + (gradient_bits or 0)) / 8
                width = widest(way, int((GIB * 2**30 / (a_parameter * 14 * LAYERS)) ** 0.5) // HEAD * HEAD)
                layers = LAYERS
            count = parameters(width, layers)
            first = first or count
            print(f"| {by} | {way} | {width} | {layers} | {count / 1e6:.0f} | {count / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
