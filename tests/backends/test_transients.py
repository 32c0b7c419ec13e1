"""Gradients and updates need no more than the gradients of the largest layer, on the smallest batch."""

import pytest

import memopt_compile as memopt
from tests.backends import transients


@pytest.mark.parametrize("case", ["GPT, 4 layers", "ResNet"])
@pytest.mark.table(4)
def test_at_most_one_layer_of_gradients(case):
    layer, every, eager = transients.transients(case, lambda step: step)
    *_, ours = transients.transients(case, lambda step: memopt.compile(step, lowering="eager"))
    assert ours <= layer < every < eager
