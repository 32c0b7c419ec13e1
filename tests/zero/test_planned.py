"""Plans for ranks that are not there, and for more layers than are traced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt_compile as memopt
from memopt_compile.errors import OptionError
from memopt_compile.reporting import layered
from tests.zero import plan_ranks

WIDTH = 64
NORMS = {"checkpointed": True, "wide": True, "batch": 256}  # which ranks gather for all layers at once


class Layers(nn.Module):
    """Equal layers, or such that grow; checkpointed where that is asked for."""

    def __init__(self, layers: int, checkpointed: bool = False, growing: bool = False,
                 wide: bool = False, classes: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.LayerNorm(4 * WIDTH), nn.GELU(),
                          nn.Linear(4 * WIDTH, WIDTH, bias=False)) if wide else
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(i if growing else 1)),
                          nn.GELU(), nn.GELU())
            for i in range(1, layers + 1))
        self.head = nn.Linear(WIDTH, classes) if classes else nn.Identity()
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def maker(mesh, stage, clip=None, batch=16, **how):
    def make(layers):
        model = Layers(layers, **how)
        opt = torch.optim.AdamW(model.parameters())
        memopt.shard_(model, opt, mesh, stage=stage)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
            return loss

        return step, (torch.randn(batch, WIDTH), torch.zeros(batch, dtype=torch.long))

    return make


@pytest.mark.parametrize(("ranks", "stage", "how"), [
    (64, 3, {"checkpointed": True}), (8, 2, {"clip": 1.0, "batch": 256})])
@pytest.mark.table(4)
def test_a_deep_model_by_shallow_ones_is_the_whole_one(ranks, stage, how):
    with memopt.planned_ranks(ranks) as mesh:
        make = maker(mesh, stage, **how)
        plan = memopt.explain_layers(make, 6, zero=stage, lowering="eager")
        step, args = make(6)
        whole = memopt.explain(step, *args, zero=stage, lowering="eager")
    assert plan.predicted_peak_bytes == whole.predicted_peak_bytes
    assert plan.resident_bytes == whole.resident_bytes and plan.at_peak == whole.memory.at_peak
    assert sum(plan.at_peak.values()) == plan.predicted_peak_bytes
    assert "6 layers by plans of 2, 3, 4" in str(plan)
    if stage == 3:  # what backward needs again of a layer, checkpointed or not, is gathered again
        assert plan.a_layer["gathered parameters"] == 0 < plan.at_peak["gathered parameters"]
    rows = -(-WIDTH // ranks) / WIDTH  # with more ranks than rows, one each for the first of them
    weights, steps = 6 * 4 * WIDTH * WIDTH, 6 * 4
    assert plan.at_peak["parameters"] == (weights if stage == 2 else rows * weights)
    assert plan.at_peak["optimizer state"] == 2 * rows * weights + steps


@pytest.mark.thorough
def test_norms_are_gathered_for_all_layers_at_once_until_a_bucket_is_full(monkeypatch):
    with memopt.planned_ranks(64) as mesh:
        make = maker(mesh, 3, **NORMS)
        kept, plan_one = {}, layered._planned  # those of 2, 3 and 4 layers are planned once
        monkeypatch.setattr(layered, "_planned", lambda make, depth, options: kept.get(depth) or kept.setdefault(
            depth, plan_one(make, depth, options)))
        plan = memopt.explain_layers(make, 5, zero=3, lowering="eager")
        step, args = make(5)
        assert plan.at_peak == memopt.explain(step, *args, zero=3, lowering="eager").memory.at_peak
        assert plan.a_layer["gathered parameters"] == 2 * 4 * (4 * WIDTH)
        with pytest.raises(OptionError, match="and 80 layers have 2.00 KiB each"):
            memopt.explain_layers(make, 80, zero=3, lowering="eager")


def test_a_model_so_deep_that_another_moment_is_the_peak_is_refused():
    """The loss, where the shallow ones have it, does not see what each layer holds ahead of its backward: its norm."""
    with memopt.planned_ranks(64) as mesh, pytest.raises(OptionError, match="with 10000 layers the peak is not where"):
        memopt.explain_layers(maker(mesh, 3, classes=512, **NORMS), 10000, zero=3, lowering="eager")


def test_the_script_that_plans_70_billion(monkeypatch, capsys):
    monkeypatch.setattr(plan_ranks, "SHAPE", {"hidden_size": 64, "intermediate_size": 256,
                                              "num_attention_heads": 4, "num_key_value_heads": 2})
    plan_ranks.main(["--ranks", "16", "--layers", "1", "--vocabulary", "64", "--tokens", "256", "--whole"])
    assert "16 ranks, stage 3: 1," in capsys.readouterr().out


def test_layers_that_are_not_alike_are_refused():
    with memopt.planned_ranks(8) as mesh, pytest.raises(OptionError, match="does not grow as layers do"):
        memopt.explain_layers(maker(mesh, 3, growing=True), 80, zero=3, lowering="eager")


@pytest.mark.parametrize(("options", "problem"), [
    ({"depths": (2, 4, 6)}, "not three depths one after the other"),
    ({"memory_budget": "1GiB"}, "a budget is for one depth")])
def test_refused_before_anything_is_made(options, problem):
    with pytest.raises(OptionError, match=problem):
        memopt.explain_layers(None, 80, **options)


def test_ranks_that_are_not_there_need_a_process_without_a_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/found", rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match="has a process group"), memopt.planned_ranks(8):
            pass
    finally:
        dist.destroy_process_group()
    with pytest.raises(OptionError, match="0 is no number of ranks"), memopt.planned_ranks(0):
        pass


@pytest.mark.parametrize("stage", [2, 3])
def test_modules_are_converted_as_in_a_script(stage):
    """To bfloat16, with a master copy: 2 bytes a parameter and 10 of a rank's part, or 12 of it; and the steps."""
    with memopt.planned_ranks(8) as mesh:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)).bfloat16()
        opt = memopt.optim.AdamW(model.parameters(), weight_bits=32)
        memopt.shard_(model, opt, mesh, stage=stage)

        def step(x):
            model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()

        held = memopt.explain(step, torch.randn(16, WIDTH).bfloat16(), zero=stage, lowering="eager").inputs
    count = WIDTH * (WIDTH + 2)
    kept = 12 * count // 8 if stage == 3 else 2 * count + 10 * count // 8
    assert held["parameters"] + held["optimizer state"] == kept + 3 * 4


def test_leaves_no_trace_behind():
    with memopt.planned_ranks(4):
        assert dist.get_world_size() == 4
    assert not dist.is_initialized()
    assert torch.ones(2).sum().item() == 2
