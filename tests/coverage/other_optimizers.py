"""Optimizers of other libraries in a step: eager beside memopt. Prints the table of docs/results/other_optimizers.md.

    python tests/coverage/other_optimizers.py [TEXT ...]    # those that have one of the texts in "library: name"

A library that is not installed is skipped. Each optimizer trains two models in float64: a network with
an embedding and BatchNorm with two groups, a schedule, clipping and a state_dict that goes out and in, for eight steps, and
a small GPT for five (the memory of the last step). Not collected by pytest.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import memopt_compile as memopt
from memopt_compile import driver

STEPS, STEPS_OF_GPT, MIDDLE = 8, 5, 3
SCHEDULES = (
    lambda opt: schedules.OneCycleLR(opt, 0.02, total_steps=20, cycle_momentum=False),
    lambda opt: schedules.CosineAnnealingWarmRestarts(opt, 3), lambda opt: schedules.LambdaLR(opt, lambda i: 1 / (1 + i)),
    lambda opt: schedules.ReduceLROnPlateau(opt, patience=0, threshold=1.0),
    lambda opt: schedules.SequentialLR(opt, [schedules.LinearLR(opt, 0.1, total_iters=3), schedules.ExponentialLR(opt, 0.9)], [3]))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(12, 5)
        self.body = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.table(x).mean(1)))


class GPT(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table, self.norms = nn.Embedding(40, width), nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x)).flatten(0, 1)


def groups(model: nn.Module) -> list[dict]:
    """Matrices, and the rest without weight decay."""
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def kinds(model: nn.Module, **of_matrices: Any) -> list[dict]:
    """The same, with what an optimizer wants to know of matrices."""
    one, other = groups(model)
    key = {"use_muon": False} if "use_muon" in of_matrices else {}
    return [{"params": one["params"], **of_matrices}, {"params": other["params"], **key}]


@dataclass(frozen=True)
class Case:
    library: str  # the name of its distribution
    name: str
    make: Callable[[nn.Module], Any]
    way: str = "plain"


def cases() -> Iterator[Case]:
    def built(library: str, module: str, names: str, make: Callable, way: str = "plain") -> Iterator[Case]:
        try:
            found = importlib.import_module(module)
        except Exception as error:  # one that asks for other libraries, too
            print(f"skipped: {library} ({error})", file=sys.stderr)
            return
        for name in names.split():
            if hasattr(found, name):
                yield Case(library, name, partial(make, getattr(found, name)), way)

    def of(library: str, module: str, names: str, way: str = "plain", flat: bool = False, **settings: Any) -> Iterator[Case]:
        return built(library, module, names, lambda kind, model: kind(
            model.parameters() if flat else groups(model), **settings), way)

    pytorch_optimizer = "pytorch-optimizer", "pytorch_optimizer"
    yield from of("lion-pytorch", "lion_pytorch", "Lion", lr=1e-3, weight_decay=0.1)
    yield from of("schedulefree", "schedulefree", "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree "
                  "AdamWScheduleFreeReference", lr=0.01)
    yield from of("schedulefree", "schedulefree", "AdamWScheduleFreeClosure", "closure", lr=0.01)
    yield from of("prodigyopt", "prodigyopt", "Prodigy", flat=True)
    yield from of("dadaptation", "dadaptation", "DAdaptAdam DAdaptSGD DAdaptLion", flat=True)
    yield from of("torch-optimi", "optimi", "AdamW Adan Lion StableAdamW", lr=0.01)
    yield from of("adan-pytorch", "adan_pytorch", "Adan", lr=1e-3)
    yield from of("came-pytorch", "came_pytorch", "CAME", lr=1e-3)
    yield from of("adabelief-pytorch", "adabelief_pytorch", "AdaBelief", lr=1e-3, print_change_log=False)
    yield from of("transformers", "transformers.optimization", "Adafactor", lr=0.01, relative_step=False)
    yield from built("muon-optimizer", "muon", "SingleDeviceMuonWithAuxAdam", lambda kind, model: kind(kinds(model, use_muon=True)))
    low_rank = {"rank": 4, "update_proj_gap": 3, "scale": 1.0, "proj_type": "std"}
    yield from built("galore-torch", "galore_torch", "GaLoreAdamW", lambda kind, model: kind(
        kinds(model, **low_rank), lr=0.01, no_deprecation_warning=True))
    yield from built("apollo-torch", "apollo_torch", "APOLLOAdamW", lambda kind, model: kind(
        kinds(model, proj="random", scale_type="channel", **low_rank), lr=0.01))
    yield from built("lomo-optim", "lomo_optim", "Lomo", lambda kind, model: kind(model, lr=0.01), "in backward")
    yield from of("madgrad", "madgrad", "MADGRAD", lr=0.01)
    yield from of("torch-optimizer", "torch_optimizer", "RAdam Ranger Shampoo QHAdam SWATS Yogi", lr=0.01)
    yield from of("timm", "timm.optim", "Lamb Adopt NAdamW RMSpropTF Mars", lr=0.01)
    yield from of(*pytorch_optimizer, "Lamb AdaBelief Adan SOAP Shampoo Kron AdEMAMix ADOPT MARS NovoGrad SM3 Fromage LARS Tiger "
                  "StableAdamW SPAM", lr=0.01)
    yield from of(*pytorch_optimizer, "SophiaH AdaHessian", "create_graph", lr=0.01)
    yield from of(*pytorch_optimizer, "Ranger21", lr=0.01, num_iterations=20)
    yield from built(*pytorch_optimizer, "Muon", lambda kind, model: kind(kinds(model, use_muon=True), lr=0.01))
    yield from built(*pytorch_optimizer, "SAM", lambda kind, model: kind(model.parameters(), torch.optim.SGD, lr=0.01), "twice")
    yield from built(*pytorch_optimizer, "Lookahead", lambda kind, model: kind(torch.optim.AdamW(model.parameters(), 0.01), k=3))
    yield from built(*pytorch_optimizer, "TRAC ScheduleFreeWrapper OrthoGrad", lambda kind, model: kind(
        torch.optim.AdamW(model.parameters(), 0.01)))


def step_of(case: Case, model: nn.Module, opt: Any, clip: bool) -> Callable:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward(create_graph=case.way == "create_graph")
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def step_with_closure(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if case.way == "closure":
            return opt.step(closure)
        loss = closure()
        opt.step(closure)
        return loss.detach()

    def step_in_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        opt.fused_backward(loss, 0.01)
        return loss.detach()

    return {"closure": step_with_closure, "twice": step_with_closure, "in backward": step_in_backward}.get(case.way, step)


def train(case: Case, number: int, large: bool, compile: Callable = lambda step: step) -> tuple[dict, int]:
    """(all that training changes, the peak of the last step)"""
    torch.manual_seed(0)
    model = GPT() if large else Network()
    opt = case.make(model)
    if "schedulefree" in type(opt).__name__.lower() and hasattr(opt, "train"):
        opt.train()
    whole = isinstance(opt, torch.optim.Optimizer) and hasattr(opt, "_optimizer_step_pre_hooks")  # no wrapper
    scheduled = not large and whole and case.way == "plain" and type(opt.param_groups[0].get("lr")) is float
    schedule = SCHEDULES[number % len(SCHEDULES)](opt) if scheduled else None
    step = compile(step_of(case, model, opt, clip=not large and number % 2 == 0))
    generator, losses, peak = torch.Generator().manual_seed(1), [], 0
    torch.manual_seed(2)
    steps = STEPS_OF_GPT if large else STEPS
    for i in range(steps):
        x = torch.randint(12, (2, 8) if large else (6, 4), generator=generator)
        y = torch.randint(5, (16 if large else 6,), generator=generator)
        if i == steps - 1:
            measured = memopt.measure(step, x, y, resident=[model, opt] if whole else None)
            losses.append(measured.result)
            peak = measured.peak_bytes
        else:
            losses.append(step(x, y))
        if schedule is not None:
            schedule.step(*[float(losses[-1])] * isinstance(schedule, schedules.ReduceLROnPlateau))
        if i == MIDDLE and not large and whole:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    states = [plain(s) for s in opt.state.values()] if hasattr(opt, "state") else []
    numbers = [{key: plain(value) for key, value in group.items() if key != "params"} for group in opt.param_groups]
    return {"losses": plain(losses), "model": plain(model.state_dict()), "states": states, "groups": numbers,
            "random": torch.get_rng_state()}, peak


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, int | float | str | None) else plain(vars(value)) if hasattr(value, "__dict__") else None


def difference(a: Any, b: Any) -> float:
    """The largest relative one; infinite where types, shapes or keys differ."""
    if type(a) is not type(b):
        return float("inf")
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        a, b = (each.double().nan_to_num() for each in (a, b))
        return float((a - b).abs().max() / max(a.abs().max(), b.abs().max(), torch.tensor(1e-8))) if a.numel() else 0.0
    if isinstance(a, dict | list):
        pairs = [(a[key], b.get(key)) for key in a] if isinstance(a, dict) else list(zip(a, b))
        return float("inf") if len(a) != len(b) else max((difference(*pair) for pair in pairs), default=0.0)
    if isinstance(a, float) and a == a:
        return abs(a - b) / max(abs(a), abs(b), 1e-8)
    return 0.0 if a == b or a != a and b != b else float("inf")


def row(case: Case, number: int) -> str:
    made, lines = [], []
    log = logging.getLogger("memopt_compile")
    log.handlers, log.propagate = [handler := logging.Handler()], False
    handler.emit = lambda record: lines.append(record.getMessage())

    def compile(step: Callable) -> Callable:
        torch.compiler.reset()
        return torch.compile(step, backend="memopt", options={"lowering": "eager"})

    known = f"| {case.library} {importlib.metadata.version(case.library)} | {case.name} |"
    try:
        expected, _ = train(case, number, False)
        large, eager = train(case, number, True)
    except Exception as error:
        return f"{known} eager itself fails here: {type(error).__name__} | | |"
    try:
        with mock.patch.object(driver, "remember", lambda frame, record: made.append(record)), \
                mock.patch.object(driver, "forget", lambda frame, record: made.remove(record)):
            got, _ = train(case, number, False, compile)
            counts = [each.kind for each in made]
            got_large, peak = train(case, number, True, compile)
    except Exception as error:
        return f"{known} FAILS: {type(error).__name__}: {str(error).splitlines()[0][:200]} | | |"
    found = re.match(r"(.+?): not captured whole: (.+?)\. It runs", lines[0], re.DOTALL) if lines else None
    kind = f"ordinary: {found[1]}: {found[2]}" if found else "whole" if set(counts) == {"step"} else "ordinary, no line"
    kind += f", {len(counts)} graphs" if kind == "whole" else ""
    largest = max(difference(expected, got), difference(large, got_large))
    return f"{known} {kind.replace('|', '/')} | {largest:.1e} | {peak / eager:.2f} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    print("| library | optimizer | captured | largest difference | peak, of eager's |\n|---|---|---|---|---|")
    for number, case in enumerate(cases()):
        if len(sys.argv) < 2 or any(text in f"{case.library}: {case.name}" for text in sys.argv[1:]):
            print(row(case, number), flush=True)
