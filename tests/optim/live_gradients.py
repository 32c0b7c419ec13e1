"""Bytes beyond parameters and state with accumulation, 16 layers of 2048 by 2048, 4 micro-batches.

    python tests/optim/live_gradients.py [--lowering eager]
"""

import argparse

import torch
from torch import nn

import memopt_compile as memopt

N, LAYERS, WIDTH = 4, 16, 2048


def transient_mib(accumulate: str | None, lowering: str) -> float:
    """Measured MiB that the third step adds to what is resident; in eager for None."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*[m for _ in range(LAYERS)
                            for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())])
    opt = torch.optim.AdamW(model.parameters())

    def step(x):
        for (xs,) in memopt.micro_batches(N, x):
            loss = model(xs).square().mean() / N
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = step if accumulate is None else torch.compile(
        step, backend="memopt", options={"accumulate": accumulate, "lowering": lowering})
    x = torch.randn(16 * N, WIDTH)
    run(x)
    run(x)
    memory = memopt.measure(run, x, resident=(model, opt))
    return (memory.peak_bytes - memory.resident_bytes) / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    lowering = parser.parse_args().lowering
    print(f"gradients of all layers: {LAYERS * WIDTH * WIDTH * 4 / 2**20:.1f} MiB")
    for accumulate in (None, "gradients", "optimizer_states"):
        print(f"{accumulate or 'eager'}: {transient_mib(accumulate, lowering):.1f} MiB", flush=True)
