"""Parameters in low precision whose rows are shared by ranks."""

from __future__ import annotations

import cases
import low_precision
import pytest
import torch
from test_optimizers import pair  # noqa: F401

from memopt_compile.distributed.low_precision import grouped
from memopt_compile.quantization.formats import Linear
from memopt_compile.quantization.operators import dequantize, quantize


@pytest.fixture
def low(pair):  # noqa: F811
    return [rank["low"] for rank in pair]


@pytest.mark.parametrize("name", low_precision.KINDS)
def test_codes_are_those_of_one_process_where_ranks_have_whole_groups(low, name):
    """Rounded stochastically, three times: what is drawn is equal too."""
    kind, _, optimizer, how = low_precision.KINDS[name]
    expected = cases.alone(kind, 2, optimizer, **how)["parameters"]
    for rank in low:
        assert (rank[name]["kind"], rank[name]["reason"]) == ("step", None)
        for key, value in expected.items():
            if hasattr(value, "form"):
                assert torch.equal(_values(rank[name]["parameters"][key]), value.dequantize())
            else:  # sums in another order
                assert float((rank[name]["parameters"][key] - value).abs().max()) < 1e-13


def test_peaks_are_predicted(low):
    """See cases.peaks: the least counts."""
    late = [min(rank["momentum"]["measured"]) / rank["momentum"]["predicted"] - 1 for rank in low]
    assert min(late) == 0 and max(late) < 0.03


def test_captured_is_eager_where_they_have_not(low):
    """Five rows, one row, none, of two ranks: groups of what a rank has."""
    for rank in low:
        for key, value in rank["uneven in eager"].items():
            assert torch.equal(_values(rank["uneven"]["parameters"][key]), _values(value))
            assert torch.equal(_values(value), _values(low[0]["uneven in eager"][key]))
    first, second = (rank["forms"]["second.weight"] for rank in low)
    assert (first.block, second.block) == (24, 24)  # 3 of 5 rows of 8, on the last rank too
    assert (first.first, second.first) == (0, 24)
    assert low[0]["draws"] == low[1]["draws"]


def test_codes_travel_not_values(low):
    """`first` is in float64. Of `second` and `row` 12 bits an element travel, those that pad it included, and
    a scale of 4 bytes for each 8 of them."""
    plain, codes, scales = 8 * (8 * 6 + 8), (6 * 8 + 2 * 8) * 12 // 8, 4 * (6 + 2)
    for rank in low:
        assert rank["momentum"]["gathered_bytes"] == plain + codes + scales


def test_checkpoints_have_values(low):
    for rank in low:
        assert rank["stored"] == {torch.Tensor}
        for key, value in rank["uneven in eager"].items():
            assert torch.equal(_values(rank["loaded"][key]), _values(value))


def test_refuses_to_decode_shards(low):
    for rank in low:
        kind, text = rank["refused"]
        assert "is sharded" in text and "state_dict()" in text


@pytest.mark.parametrize("count, block", [(4096, 2048), (2048, 2048), (3000, 1500), (18, 20), (6145, 1540)])
def test_groups_of_a_rank(count, block):
    """Of one size, not more than asked for, and no more of them than needed."""
    assert grouped(Linear(12), count).block == block


def test_parts_are_rounded_as_in_the_whole():
    form, draws = Linear(8, 64, seed=3), torch.tensor(5)
    value = torch.randn(512)

    def rounded(part, first):
        parts = quantize(part, draws, form.map, form.bits, form.block, form.seed, first)
        return dequantize(parts, form.map, form.bits, form.block, [len(part)], part.dtype)

    halves = [rounded(part, 256 * i) for i, part in enumerate(value.chunk(2))]
    assert torch.equal(torch.cat(halves), rounded(value, 0))
    assert not torch.equal(rounded(value[256:], 0), halves[1])


def _values(p):
    return p.dequantize() if hasattr(p, "form") else p
