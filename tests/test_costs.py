"""What an operator holds beyond its result, against what it is seen to hold."""

import pytest
import torch

from memopt_compile.costs import workspace_bytes
from memopt_compile.measure import measure

aten = torch.ops.aten


@pytest.mark.parametrize("operator, args", [
    (aten.mul.Scalar, (2.0,)), (aten.mul_.Scalar, (2.0,)), (aten.mul.Tensor, (2.0,)), (aten.add.Tensor, (3,)),
    (aten.div_.Tensor, (2,)), (aten.pow.Tensor_Scalar, (2,)), (aten.pow.Tensor_Scalar, (1.5,)), (aten.gt.Scalar, (0,)),
    (aten.clamp.default, (0.0, 1.0)), (aten.leaky_relu.default, (0.1,)), (aten.relu.default, ()), (aten.exp.default, ())])
def test_numbers_become_tensors(operator, args):
    """A number beside a pointwise operator may be a tensor of eight bytes while that runs."""
    operand = torch.rand(64, 32)
    seen = measure(lambda: operator(operand, *args), resident=[operand])
    assert workspace_bytes(operator, (operand, *args), {}) == seen.transient_peak_bytes - seen.end_bytes
