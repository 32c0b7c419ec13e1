"""Every lever in one graph: parameters, moments and activations in few bits, AdamA, micro-batches, a budget."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt

WIDTH, TOKENS = 64, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.heads(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def trained(budget=None, compress=None):
    """The report, losses, parts of all parameters and the measured peak, of three steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), Block(), Block(), nn.Linear(WIDTH, TOKENS))
    memopt.quantize_parameters_(model, bits=8)
    opt = memopt.optim.AdamA(model.parameters(), lr=1e-3, state_bits=8, micro_batches=2)

    def step(tokens, following):
        total = 0.0
        for x, y in memopt.micro_batches(2, tokens, following):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
            loss.backward()
            opt.accumulate()
            total = total + loss.detach()
        opt.step()
        return total

    run = memopt.compile(step, lowering="eager", memory_budget=budget, compress=compress)
    tokens = torch.randint(TOKENS, (16, 32), generator=torch.Generator().manual_seed(1))
    losses = [float(run(tokens, tokens.roll(-1, 1))) for _ in range(3)]
    peak = memopt.measure(run, tokens, tokens.roll(-1, 1), resident=(model, opt)).peak_bytes
    return memopt.report(run), losses, [part.clone() for p in model.parameters() for part in p.parts], peak


@pytest.fixture(scope="module")
def free():
    return trained()


@pytest.mark.parametrize(("share", "compress"), [(0.62, None), (0.6, "int4")])
@pytest.mark.table(4)
def test_all_levers_in_one_graph_keep_the_budget(free, share, compress):
    """Without fewer bits of activations the numbers are those without a budget, rounding drawn at random included."""
    report, losses, parts, peak = trained(share, compress)
    assert report.kind == "step" and report.predicted_peak_bytes <= report.budget_bytes
    assert peak <= report.budget_bytes and abs(peak - report.predicted_peak_bytes) <= 0.01 * peak
    changes = {p.name: sum(count for _, count in p.op_changes) for p in report.passes}
    assert changes["recompute"] > 0 and (compress is None or changes["compress"] > 0)
    if compress is None:
        assert losses == free[1] and all(torch.equal(a, b) for a, b in zip(parts, free[2]))
    else:
        assert losses[0] == free[1][0] and all(abs(a - b) < 0.01 for a, b in zip(losses, free[1]))
