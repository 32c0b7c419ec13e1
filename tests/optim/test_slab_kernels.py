"""Updates of low-precision parameters by kernels that Inductor makes: the eager code's numbers."""

import pytest
import torch

import memopt_compile as memopt
from memopt_compile import optim
from memopt_compile.lowering import slab_kernels
from memopt_compile.lowering.slab_kernels import compiled_update, compiled_update_
from memopt_compile.optim.one_operator import KEPT, quantized_update

pytestmark = pytest.mark.inductor
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device")])]
ELEMENTS = 2 * slab_kernels.ELEMENTS + 2048 + 77  # two slabs, a block and a part of one
WHOLE = 2 * slab_kernels.ELEMENTS + 4096  # two slabs and a block of means


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    with torch.device(request.param):
        yield torch.device(request.param)


def given(bits, make, kept=False, elements=ELEMENTS, **settings):
    """Arguments of the operators, behind an eager step that has given the state some values."""
    model = torch.nn.Linear(elements, 1, bias=False, dtype=torch.bfloat16 if bits == 16 else torch.float32)
    if bits < 16:
        memopt.quantize_parameters_(model, bits)
    p, opt = model.weight, make(model.parameters())
    p.grad = torch.randn(1, elements, dtype=p.dtype)
    opt.step()
    state, group = opt.state[p], {**opt.param_groups[0], **settings}
    betas = group.pop("betas", ())
    numbers = {k: v for k, v in group.items() if isinstance(v, torch.Tensor)}
    plain = {k: float(v) for k, v in group.items() if isinstance(v, bool | int | float)}
    names = [name for name in state if isinstance(state[name], torch.Tensor) and name not in KEPT]
    keys = [*("betas" for _ in betas), *plain, *(f"{name}*" for name in numbers)]
    grad = [state[name] for name in KEPT] if kept else [torch.randn(1, elements, dtype=p.dtype)]
    layout = [p.form.bits, p.form.block, p.form.seed, 4096] if bits < 16 else [0, 0, -1, 4096]
    return (list(p.parts) if bits < 16 else [p.detach()], grad, [state[n] for n in names], f"{type(opt).__name__} _update_in_slabs",
            " ".join(names), " ".join(keys), [*betas, *plain.values()], list(numbers.values()),
            [*layout, 1, elements], p.dtype)


@pytest.mark.parametrize(("bits", "make", "kept"), [
    (10, lambda p: optim.AdamW(p, state_bits=4, amsgrad=True), False),
    (12, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, state_bits=8, gradient_bits=8), True),
    (16, lambda p: optim.AdamW(p, state_bits=8, weight_bits=24), False),
    (32, lambda p: optim.AdamW(p, state_bits=8), False)])
@torch.no_grad()
@pytest.mark.table(8)
def test_it_is_the_eager_update(bits, make, kept):
    torch.manual_seed(0)
    args = given(bits, make, kept, weight_decay=torch.tensor(0.02, dtype=torch.float64, device="cpu"))
    torch.compiler.reset()
    for expected, got in zip(quantized_update(*args), compiled_update(*args), strict=True):
        if got.dtype == torch.float32:
            # A weight is the difference of numbers that are larger than it.
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9 if got.numel() == ELEMENTS else 0)
        elif got.dtype in (torch.uint8, torch.int8, torch.bfloat16):
            assert (got != expected).double().mean() < (1e-2 if got.dtype == torch.int8 else 1e-3)
        else:
            assert torch.equal(got, expected)
    in_place = [[t.clone() for t in args[i]] for i in (0, 2)]
    compiled_update_(in_place[0], args[1], in_place[1], *args[3:])
    assert all(map(torch.equal, [*in_place[0], *in_place[1]], compiled_update(*args)))
    made = slab_kernels._kernel.cache_info().misses
    args[7][0].mul_(0.5)  # as a schedule does
    smaller = compiled_update(*args)
    assert slab_kernels._kernel.cache_info().misses == made
    args[7][0].zero_()
    assert any((a != b).any() for a, b in zip(smaller, compiled_update(*args), strict=True))
    assert slab_kernels._kernel.cache_info().misses == made + 1, "without a weight decay"


@pytest.mark.parametrize("elements", [WHOLE, ELEMENTS])
@torch.no_grad()
def test_so_it_is_of_means(elements):
    """Those of a block that is not full are taken by the eager code itself."""
    torch.manual_seed(0)
    args = given(32, lambda p: optim.AdamW(p, state_bits=1), elements=elements)
    made = slab_kernels._kernel.cache_info().misses
    for expected, got in zip(quantized_update(*args), compiled_update(*args), strict=True):
        if got.dtype == torch.uint8:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)
    assert slab_kernels._kernel.cache_info().misses - made == (elements == WHOLE)


def test_an_update_without_states_is_captured(device):
    model = memopt.quantize_parameters_(torch.nn.Linear(60, 4), 8, rounding="nearest")
    opt = optim.SGD(model.parameters(), lr=0.1, state_bits=8)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run, x = memopt.compile(step), torch.randn(8, 60)
    losses = [float(run(x)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    found = memopt.report(run)  # an allocator of a GPU rounds sizes up
    assert found.predicted_peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0 if device.type == "cpu" else 0.005)
