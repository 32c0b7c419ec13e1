"""The roofline's rates: float32 on a GPU is as PyTorch is set up to compute it."""

from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from memopt_compile import seconds
from memopt_compile.compat.trace import float32_precision
from memopt_compile.seconds import A100, CPU, GPUS, Roofline, flops, roofline
from memopt_compile.seconds_cache import setup

MATMUL, CONV = torch.backends.cuda.matmul, torch.backends.cudnn.conv


@pytest.fixture(autouse=True)
def settings():
    """What a test sets is undone, so that either API reads as before."""
    before = torch.get_float32_matmul_precision(), MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before[1]
    torch.set_float32_matmul_precision(before[0])
    assert before[0] == torch.get_float32_matmul_precision()


def operators(dtype=torch.float32):
    """The nodes of a product, a convolution and a sine, by name, and of the convolution's backward."""
    def calls(x, w, image, kernel):
        out = F.conv2d(image, kernel)
        return x @ w, x.sin(), torch.ops.aten.convolution_backward(
            out, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])

    graph = make_fx(calls, tracing_mode="fake")(*(torch.ones(*shape, dtype=dtype) for shape in (
        (2048, 2048), (2048, 2048), (64, 256, 32, 32), (256, 256, 3, 3)))).graph
    return {n.target.overloadpacket.__name__: n for n in graph.nodes if hasattr(n.target, "overloadpacket")}


@pytest.fixture(scope="module")
def nodes():
    return operators()


def rate(gpu, node):
    """Flops a second of a node that arithmetic bounds."""
    return flops(node) / (Roofline(gpu)(node) - gpu.launch)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_by_default_convolutions_are_of_tf32_and_products_are_not(nodes, gpu):
    assert rate(gpu, nodes["mm"]) == pytest.approx(gpu.flops[torch.float32])
    assert rate(gpu, nodes["convolution"]) == pytest.approx(gpu.tf32)
    assert rate(gpu, nodes["convolution_backward"]) == pytest.approx(gpu.tf32)
    assert gpu.flops[torch.float32] < gpu.tf32


@pytest.mark.parametrize("precision, tf32", [("high", True), ("medium", True), ("highest", False)])
def test_products_by_the_older_names(nodes, precision, tf32):
    torch.set_float32_matmul_precision(precision)
    assert rate(A100, nodes["mm"]) == pytest.approx(A100.tf32 if tf32 else A100.flops[torch.float32])


def test_convolutions_by_the_older_names(nodes):
    # (Other tests import what forbids to set the flag itself.)
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert rate(A100, nodes["convolution"]) == pytest.approx(A100.flops[torch.float32])


def test_by_the_newer_names(nodes):
    """Where the older ones, asked for the same, raise."""
    MATMUL.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="legacy"):
        torch.get_float32_matmul_precision()
    assert rate(A100, nodes["mm"]) == pytest.approx(A100.tf32)
    assert setup(torch.device("cuda"))["float32"] == ["tf32", "tf32"]


def test_only_products_and_convolutions_of_float32_are_of_tf32(nodes):
    torch.set_float32_matmul_precision("high")
    assert not seconds.in_tf32(nodes["sin"])
    for dtype in (torch.float64, torch.bfloat16):
        assert rate(A100, operators(dtype)["mm"]) == pytest.approx(A100.flops[dtype])


def test_a_cpu_has_no_tf32(nodes):
    before = roofline("cpu")(nodes["mm"])
    torch.set_float32_matmul_precision("high")
    assert roofline("cpu")(nodes["mm"]) == before and not CPU.tf32
    assert float32_precision("cpu", "conv") == "ieee"


def test_rates_by_the_name_of_the_device(nodes):
    with (mock.patch.object(torch.cuda, "is_available", return_value=True),
          mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H100 80GB HBM3")):
        assert rate(seconds.rates("cuda"), nodes["mm"]) == pytest.approx(67e12)


@pytest.mark.parametrize("call, functional", [
    (torch.Tensor.addmm_, torch.addmm), (torch.Tensor.baddbmm_, torch.baddbmm), (torch.Tensor.mul_, torch.mul)])
def test_what_is_computed_in_place_takes_its_time_too(call, functional):
    shape = (4, 32, 32) if functional is torch.baddbmm else (32, 32)
    operands = [torch.ones(*shape) for _ in range(2 if functional is torch.mul else 3)]
    times = []
    for each in (call, functional):
        graph = make_fx(lambda *a, of=each: of(*a), tracing_mode="fake")(*operands).graph
        times.append(sum(map(roofline("cpu"), (n for n in graph.nodes if n.op == "call_function"))))
    assert 0 < times[0] <= times[1]
    assert functional is torch.mul or times[0] > 2 * 32**3 / CPU.flops[torch.float32]


def test_attention_on_a_cpu_takes_the_flops_of_its_products():
    def attend(q):
        out = F.scaled_dot_product_attention(q, q, q)
        return torch.autograd.grad(out.sum(), q)

    q = torch.ones(2, 3, 64, 16, requires_grad=True)
    counts = [flops(n) for n in make_fx(attend, tracing_mode="fake")(q).graph.nodes if "attention" in n.name]
    product = 2 * 2 * 3 * 64 * 64 * 16
    assert counts == [2 * product, 5 * product]
