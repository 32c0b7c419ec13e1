"""The optimizers of `memopt.optim` with their states in shards."""

from __future__ import annotations

from functools import partial

import cases
import pytest
import torch
from ranks import on_ranks
from torch import nn

import memopt_compile as memopt

DOUBLE = torch.float64
ELEMENTWISE = {
    "sgd": partial(memopt.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": partial(memopt.optim.Adam, lr=0.02, weight_decay=0.1, amsgrad=True, skip_nonfinite=True),
    "adamw": partial(memopt.optim.AdamW, lr=0.02),
}
FACTORED = {
    "came": partial(memopt.optim.CAME, lr=0.02, weight_decay=0.1),
    "adafactor": partial(memopt.optim.Adafactor, lr=0.02),
}


def of(make, model):
    return make([p for p in model.parameters() if p.requires_grad])


def wide() -> nn.Module:
    """Parameters of whole blocks of 8 and 4 bits on each of two ranks."""
    return nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def of_two(rank, ranks):
    found = {}
    for name, make in ELEMENTWISE.items():
        for stage in (0, 1, 3):
            found[name, stage] = cases.trained(rank, ranks, stage, cases.Uneven, torch.float32, partial(of, make))
    for bits in (8, 4):
        for stage in (0, 2):
            make = partial(ELEMENTWISE["adamw"], state_bits=bits)
            found[bits, stage] = cases.trained(rank, ranks, stage, wide, torch.float32, partial(of, make))
    for name, make in FACTORED.items():
        for stage in (1, 3):
            found[name, stage] = cases.trained(rank, ranks, stage, cases.Uneven, DOUBLE, partial(of, make))
    return found

if __name__ == "__main__":
    import time, tempfile
    from pathlib import Path
    t=time.time()
    r = on_ranks(2, Path(tempfile.mkdtemp()), of_two, 2)
    print(time.time()-t)
    a=r[0]
    for k,v in a.items():
        print(k, v["kind"], v["reason"], v["losses"], v["resident"])
        if k[1]:
            if k[0] in FACTORED:
                e=cases.alone(cases.Uneven,2,partial(of,FACTORED[k[0]]))
                print(max(float((v["parameters"][n]-e["parameters"][n]).abs().max()) for n in e["parameters"]), v["calls"])
            else:
                z=a[k[0],0]
                print(all(torch.equal(v["parameters"][n], z["parameters"][n]) for n in z["parameters"]), v["losses"]==z["losses"])
