"""Memory of a step by kind, in bits a parameter, and which way gradients went."""

import pytest
import torch
from torch import nn

import memopt_compile as memopt
from memopt_compile.options import format_bytes
from memopt_compile.reporting.model_memory import EIGHT, FOLDED, FREED, FULL, LEFT

optim, WIDTH, LAYERS = memopt.optim, 64, 3
ELEMENTS = LAYERS * WIDTH**2


def sgdm(p, **bits):
    return optim.SGD(p, lr=0.1, momentum=0.9, **bits)


def adamw(p):
    return torch.optim.AdamW(p)


def linear():
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]


def convolution():
    """Its backward gives several results at once."""
    return [nn.Unflatten(1, (WIDTH, 1, 1)), nn.Conv2d(WIDTH, LAYERS * WIDTH, 1, bias=False)]


def planned(make, bits=None, micro_batches=2, accumulate=False, zero=True, clip=False, layers=linear,
            options=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    if bits:
        memopt.quantize_parameters_(model, bits)
    opt = make(model.parameters())

    def step(x):
        for some, in memopt.micro_batches(micro_batches, x):
            (model(some).square().mean() / micro_batches).backward()
            if accumulate:
                opt.accumulate()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if zero:
            opt.zero_grad()

    return memopt.explain(step, torch.randn(2 * WIDTH * micro_batches, WIDTH), lowering="eager", **(options or {}))


@pytest.mark.parametrize(("way", "words", "settings"), [
    (FREED, "freed one by one", {"make": adamw, "micro_batches": 1}),
    (FREED, "freed one by one", {"make": torch.optim.Adamax, "micro_batches": 1}),  # adds a number to the gradient
    (FREED, "kept until", {"make": adamw, "micro_batches": 1, "clip": True}),
    (FREED, "kept until", {"make": adamw, "micro_batches": 1, "clip": True, "layers": convolution}),
    (FULL, FULL, {"make": adamw}),
    (LEFT, LEFT, {"make": sgdm, "micro_batches": 1, "zero": False}),
    (EIGHT, EIGHT, {"make": lambda p: sgdm(p, state_bits=8, gradient_bits=8), "bits": 12,
                    "accumulate": True}),
    (FOLDED, FOLDED, {"make": lambda p: optim.AdamA(p, state_bits=8), "bits": 8, "accumulate": True}),
    (FOLDED, FOLDED, {"make": adamw, "options": {"accumulate": "optimizer_states"}}),
], ids=["freed", "Adamax", "kept", "convolution", "full precision", "left", "8 bits", "AdamA", "by the option"])
@pytest.mark.table(6)
def test_way_of_gradients_and_what_is_held_of_them(way, words, settings):
    report = planned(**settings)
    memory = report.memory
    assert list(memory.gradients) == [way]
    assert f"gradients {words}" in str(report)
    assert (memory.parameters, memory.gradient_bytes) == (ELEMENTS, 4 * ELEMENTS)
    held = memory.most["gradients"]
    if way in (FULL, LEFT) or words.startswith("kept"):
        assert held >= 4 * ELEMENTS
    elif way == EIGHT:
        assert memory.bits(memory.between["gradients"]) == pytest.approx(8 + 32 / 2048)
        assert memory.bits(memory.between["parameters"]) == pytest.approx(12 + 32 / 2048 + 64 / WIDTH**2)
        assert memory.most["decoded parameters"] < 4 * ELEMENTS
    else:
        assert 0 < held <= (4 if way == FOLDED else 3) * ELEMENTS
    peak = max(live for _, live in report.timelines["after passes"])
    assert sum(memory.at_peak.values()) == peak
    assert sum(memory.between.values()) == report.resident_bytes
    assert all(0 <= memory.between[kind] <= memory.at_peak[kind] <= memory.most[kind] for kind in memory.most)
    waits = words.startswith("kept") and settings.get("layers") is not convolution  # which has a single gradient
    assert bool(memory.waited_for) == waits
    assert memory.largest == 4 * ELEMENTS // (1 if "layers" in settings else LAYERS)
    if waits:
        assert "clip_grad_norm_" in memory.waited_for
        assert (f"all {format_bytes(4 * ELEMENTS)} of gradients are alive at once, where the largest has "
                f"{format_bytes(4 * WIDTH**2)}, for test_model_memory.py") in str(report)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.table(6)
def test_with_zero_the_way_is_that_of_the_rows(stage, clip):
    """A whole gradient is larger than all rows of a rank, and is freed where it is scattered."""
    with memopt.planned_ranks(8) as mesh:
        model = nn.Sequential(*linear())
        opt = adamw(model.parameters())
        memopt.shard_(model, opt, mesh, stage=stage)

        def step(x):
            model(x).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

        torch._dynamo.reset()
        memory = memopt.explain(step, torch.zeros(4, WIDTH), zero=stage, lowering="eager").memory
    assert memory.gradient_bytes == 4 * ELEMENTS // 8 < memory.most["gradients"]
    assert memory.way.startswith("kept" if clip else "freed one by one")
    assert bool(memory.waited_for) == clip and (memory.at_once == memory.gradient_bytes) == clip
