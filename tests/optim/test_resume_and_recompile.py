"""What `resume_and_recompile.py` counts and compares, for one width of each optimizer."""

from functools import partial

import pytest
import torch
from resume_and_recompile import MAKERS, resumed, same

WAYS = [("SGD", 4, None), ("Adam", 32, None), ("AdamW", 8, 24), ("AdamA", 8, None), ("CAME", 8, 16),
        ("Adafactor", 32, None)]


@pytest.mark.parametrize(("lowering", "name", "bits", "weight_bits"), [
    *((lowering, *way) for lowering in (None, "eager") for way in WAYS),
    pytest.param("inductor", "AdamW", 8, 24, marks=[pytest.mark.inductor, pytest.mark.thorough])])
@pytest.mark.table(6)
def test_one_graph_and_the_same_bits(lowering, name, bits, weight_bits):
    make = partial(MAKERS[name], state_bits=bits, weight_bits=weight_bits)
    dtype = torch.bfloat16 if weight_bits else torch.float32
    assert resumed(make, False, lowering, dtype) == (int(lowering is not None), [])


@pytest.mark.parametrize("name", ["SGD", "AdamA"])
def test_one_graph_where_a_scheduler_moves_the_momentum(name):
    assert resumed(MAKERS[name], True, "eager") == (1, [])


def test_a_difference_is_seen():
    def forgetful(p):
        opt = MAKERS["SGD"](p)
        opt.register_load_state_dict_post_hook(lambda opt: next(iter(opt.state.values()))[
            "momentum_buffer"].zero_())
        return opt

    assert "0.momentum_buffer" in resumed(forgetful, False, None)[1]
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
