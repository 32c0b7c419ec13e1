"""What an operator holds beyond its result, against what it is seen to hold."""

import pytest
import torch

from memopt_compile.compat import dry_run
from memopt_compile.costs import workspace_bytes
from memopt_compile.lowering.compiled_pieces import watch
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


def test_products_of_16_bits_hold_copies_of_operands_on_inductor_too():
    """oneDNN lays them out for itself. Into a given result, as Inductor's wrappers have it."""
    wrapper = """
def call(args):
    a, b = args
    args.clear()
    buf0 = empty_strided_cpu((256, 64), (64, 1), torch.bfloat16)
    extern_kernels.mm(a, b, out=buf0)
    return (buf0,)
"""
    a, b = torch.zeros(128, 256, dtype=torch.bfloat16).t(), torch.zeros(128, 64, dtype=torch.bfloat16)
    out = torch.empty(256, 64, dtype=torch.bfloat16)
    aten.mm.out(a, b, out=out)
    seen = measure(lambda: aten.mm.out(a, b, out=out), resident=[a, b, out])
    with dry_run.FakeTensorMode() as fake:
        given = [fake.from_tensor(t) for t in (a, b)]
        with watch(given) as watched:
            dry_run.dry_call(wrapper)(given)
    assert watched.peak_bytes == out.nbytes + seen.transient_peak_bytes
