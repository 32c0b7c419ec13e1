"""What an operator holds beyond its result, against what it is seen to hold."""

from functools import partial

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


def held(call, *operands):
    seen = measure(call, resident=operands)
    return seen.transient_peak_bytes - seen.end_bytes


@pytest.mark.parametrize("operator, args", [
    (aten.sqrt.default, ()), (aten.sin.default, ()), (aten.div.Scalar, (2,)), (aten.div.Tensor, (3.0,)), (aten.eq.Scalar, (0,)),
    (aten.mul.Scalar, (2,)), (aten.pow.Tensor_Scalar, (2,)), (aten.lt.Scalar, (1,)), (aten.bitwise_not.default, ()),
    (aten.isinf.default, ()), (aten.logical_not.default, ())])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_pointwise(operator, args, dtype):
    """Where an operand becomes one of another type first, or a first kernel's result is what a second one reads."""
    operand = torch.ones(64, 32, dtype=dtype)
    try:
        operator(operand, *args)
    except RuntimeError as refusal:
        pytest.skip(str(refusal))
    assert workspace_bytes(operator, (operand, *args), {}) == held(lambda: operator(operand, *args), operand)


def pointwise():
    for packet in (getattr(aten, name) for name in sorted(dir(aten))):
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            if torch.Tag.pointwise in (each := getattr(packet, overload)).tags and "out" not in overload:
                yield each


def values_of(operator, dtype):
    """What is given to each of its arguments that needs it, by name; None if there is one of another kind."""
    known = {"Tensor": lambda: (torch.rand(64, 64) + 0.1).to(dtype), "number": lambda: 2, "float": lambda: 0.5, "int": lambda: 1,
             "SymInt": lambda: 1, "bool": lambda: False}
    found = {}
    for argument in operator._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if argument.has_default_value() and kind != "Tensor":
            continue
        if kind not in known:
            return None
        found[argument.name] = known[kind]()
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_all_pointwise(dtype):
    checked = 0
    for operator in pointwise():
        if (given := values_of(operator, dtype)) is None:
            continue
        args = tuple(given[a.name] for a in operator._schema.arguments if a.name in given and not a.kwarg_only)
        kwargs = {a.name: given[a.name] for a in operator._schema.arguments if a.name in given and a.kwarg_only}
        try:
            operator(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # not of this type
            continue
        tensors = [a for a in given.values() if isinstance(a, torch.Tensor)]
        assert workspace_bytes(operator, args, kwargs) == held(partial(operator, *args, **kwargs), *tensors), operator
        checked += 1
    assert checked > 100


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
