"""Small stacks of equal layers, and their steps as a plan finds them."""

import functools

import torch
from graphs import training_step
from torch import nn

from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.replay_dropout import ReplayDropout
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak


class Attention(nn.Module):
    """Pre-norm self-attention with a skip, which reads its input twice."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + torch.softmax(q @ k.t(), -1) @ v


def stack(*kinds, times):
    return [make() for _ in range(times) for make in kinds]


MODELS = {
    "linear": lambda: stack(lambda: nn.Linear(32, 32), nn.GELU, times=4),
    "dropout": lambda: stack(lambda: nn.Linear(32, 32), lambda: nn.Dropout(0.3), nn.Tanh, times=3),
    "attention": lambda: stack(Attention, times=3),
    "normed": lambda: stack(lambda: nn.BatchNorm1d(32), lambda: nn.Linear(32, 32), nn.ReLU, times=3),
}


@functools.cache
def prepared(name, micro_batches=1):
    torch.manual_seed(0)
    model = nn.Sequential(*MODELS[name](), nn.Linear(32, 4)).double()
    step = training_step(model, torch.optim.SGD, batch=64, micro_batches=micro_batches)
    for each in (Canonicalize(), ReleaseGradients(), ScheduleForPeak(), ReplayDropout(0)):
        each.run(step)
    return step
