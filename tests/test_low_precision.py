"""Models with parameters in few bits: conversion, eager use, files and refusals."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

import memopt_compile as memopt
from memopt_compile.errors import QuantizationError
from memopt_compile.measure import measure
from memopt_compile.quantization.parameters import LowPrecisionTensor
from memopt_compile.quantization.rounding import noise


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 33), nn.GELU(),
                         nn.Linear(33, 5))


def images():
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def packed(model):
    return [part for p in model.parameters() for part in p.parts]


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_values_are_near_and_bytes_are_few(bits):
    plain, model = network(), memopt.quantize_parameters_(network(), bits=bits)
    assert all(isinstance(p, LowPrecisionTensor) and isinstance(p, nn.Parameter) and p.is_leaf
               and p.requires_grad for p in model.parameters())
    for p, q in zip(plain.parameters(), model.parameters()):
        assert q.shape == p.shape and q.dtype == p.dtype
        assert (q.dequantize() - p).abs().max() <= p.abs().max() / (2**bits - 2) * 1.0001
        assert sum(part.nbytes for part in q.parts) == q.form.sizes(p.numel())[0] + 4 * -(
            -p.numel() // 2048) + 8
    got = (model.eval()(images()) - plain.eval()(images())).abs().max()
    assert 0 < got < {8: 0.05, 10: 0.015, 12: 0.004}[bits]


def test_gradients_are_those_of_the_decoded_model():
    model = memopt.quantize_parameters_(network())
    plain = memopt.dequantize_parameters_(copy.deepcopy(model))
    for each in (model, plain):
        each(images()).square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        assert type(q.grad) is torch.Tensor and torch.equal(p.grad, q.grad)


def test_dequantize_gives_what_the_model_computes_with():
    model = memopt.quantize_parameters_(network())
    wanted = model.eval()(images())
    assert memopt.dequantize_parameters_(model) is model
    assert all(type(p.data) is torch.Tensor for p in model.parameters())
    assert torch.equal(model(images()), wanted)
    assert memopt.dequantize_parameters_(model) is model  # nothing to do


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_files_have_the_codes_and_load_bit_by_bit():
    model = memopt.quantize_parameters_(network())
    model[3].weight.detach().mul_(0.5)  # a write, so that `draws` has moved
    other = memopt.quantize_parameters_(network(1))
    other.load_state_dict(saved(model.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(packed(model), packed(other)))
    file = io.BytesIO()
    torch.save(memopt.quantize_parameters_(nn.Linear(512, 512)).state_dict(), file)
    assert file.tell() < 1.52 * 512 * 513 + 8000


def test_ordinary_weights_load_and_are_given_out():
    model = memopt.quantize_parameters_(network())
    wanted = network(5).state_dict()
    model.load_state_dict(wanted)
    export = memopt.dequantize_parameters_(copy.deepcopy(model)).state_dict()
    for name, value in export.items():
        assert type(value) is torch.Tensor
        assert (value - wanted[name]).abs().max() <= wanted[name].abs().max() / 2047 * 1.0001
    network().load_state_dict(export)


def test_copies_devices_and_types():
    model = memopt.quantize_parameters_(network())
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(packed(model), packed(twin)))
    assert all(p.requires_grad for p in twin.parameters())
    twin.to("cpu", torch.bfloat16)
    assert all(isinstance(p, LowPrecisionTensor) and p.dtype == torch.bfloat16 for p in twin.parameters())
    assert all(torch.equal(a, b) for a, b in zip(packed(model), packed(twin)))
    assert twin(images().bfloat16()).dtype == torch.bfloat16
    assert all(part.device.type == "meta" for part in packed(twin.to("meta")))


@torch.inference_mode()
def test_in_inference_mode_another_type_has_the_same_codes():
    """There PyTorch leaves it to the tensor to take `to` apart."""
    model = memopt.quantize_parameters_(nn.Linear(30, 20).bfloat16())
    wanted = packed(model)
    values = model.weight.to(torch.float32).dequantize()
    assert not torch.equal(values, values.bfloat16().float())
    assert all(map(torch.equal, packed(model.float()), wanted)) and torch.equal(model.weight.dequantize(), values)


def test_autocast_and_recurrent_and_attention_layers_run():
    for layer, x in ((nn.LSTM(8, 6, batch_first=True), torch.randn(2, 3, 8)),
                     (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 3, 8)),
                     (nn.Embedding(10, 4), torch.tensor([[1, 2]]))):
        model = memopt.quantize_parameters_(layer)
        plain = memopt.dequantize_parameters_(copy.deepcopy(model))
        first = [out[0] if isinstance(out, tuple) else out for out in (model(x), plain(x))]
        assert torch.equal(*first)
        first[0].sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.eval()
        with torch.no_grad():
            assert (model(x)[0] - plain.eval()(x)[0]).abs().max() < 1e-5 if x.dtype.is_floating_point else True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert memopt.quantize_parameters_(nn.Linear(3, 2))(torch.randn(1, 3)).dtype == torch.bfloat16


def test_tied_parameters_stay_tied():
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12, bias=False))
    model[1].weight = model[0].weight
    memopt.quantize_parameters_(model)
    assert model[1].weight is model[0].weight and len(list(model.parameters())) == 1
    memopt.dequantize_parameters_(model)
    assert model[1].weight is model[0].weight and type(model[0].weight.data) is torch.Tensor


@pytest.mark.parametrize("skip", ["*.bias", ["0.bias", "1.bias", "3.bias", "5.bias"],
                                  lambda name, p: name.endswith("bias")], ids=["pattern", "names", "function"])
def test_what_is_skipped_stays(skip):
    model = memopt.quantize_parameters_(network(), skip=skip)
    low = {name for name, p in model.named_parameters() if isinstance(p, LowPrecisionTensor)}
    assert low == {"0.weight", "1.weight", "3.weight", "5.weight"}


def test_gradient_and_marks_of_the_user_stay():
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.ones(2, 3)
    layer.weight.no_decay = True
    layer.bias.requires_grad_(False)
    memopt.quantize_parameters_(layer)
    assert layer.weight.grad.sum() == 6 and layer.weight.no_decay and not layer.bias.requires_grad
    memopt.dequantize_parameters_(layer)
    assert layer.weight.grad.sum() == 6 and layer.weight.no_decay and not layer.bias.requires_grad


def test_other_names_draw_other_numbers_and_the_same_again():
    one, again = (memopt.quantize_parameters_(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]))
                  for _ in range(2))
    counts = [int(p.draws) for p in one.parameters()]
    assert len(set(counts)) == 4 and counts == [int(p.draws) for p in again.parameters()]


def spoilt(kind):
    model = network()
    if kind == "NaN":
        model[5].bias.data[2] = float("nan")
    elif kind == "complex":
        model[5].bias = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
    elif kind == "integers":
        model[5].bias = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
    elif kind == "float8":
        model[5].bias = nn.Parameter(torch.zeros(5).to(torch.float8_e4m3fn), requires_grad=False)
    elif kind == "memory":
        model[5].scale = nn.Parameter(model[5].bias.data)
    elif kind == "lazy":
        model[5] = nn.LazyLinear(5)
    elif kind == "meta":
        model[5] = nn.Linear(33, 5, device="meta")
    elif kind == "double":
        model[5].bias = nn.Parameter(torch.full((5,), 1e39, dtype=torch.float64))
    elif kind == "hook":
        model[5].bias.register_hook(lambda g: g)
    elif kind == "quantized":
        memopt.quantize_parameters_(model[5])
    return model


@pytest.mark.parametrize(("kind", "says"), [
    ("NaN", "NaN or Inf"), ("float8", "does not compute"), ("memory", "'5.bias', '5.scale' are different ones"), ("complex", "complex"), ("integers", "floating-point"), ("lazy", "no values"),
    ("meta", "no values"), ("double", "beyond the range of float32"), ("hook", "hook"), ("quantized", "already")])
def test_a_parameter_without_a_format_is_refused_by_name(kind, says):
    model = spoilt(kind)
    before = list(model.parameters())
    with pytest.raises(QuantizationError, match=rf"'5\.\w+'.*{says}|{says}"):
        memopt.quantize_parameters_(model)
    assert all(a is b for a, b in zip(before, model.parameters()))
    memopt.quantize_parameters_(model, skip=["5.*"])
    assert isinstance(model[3].weight, LowPrecisionTensor)


@pytest.mark.parametrize("settings", [{"bits": 11}, {"bits": 4}, {"bits": 12.5}, {"group_size": 0},
                                      {"group_size": 2046}, {"group_size": 2048.0}, {"rounding": "up"},
                                      {"seed": -1}, {"skip": ["3.wieght"]}, {"bits": [8]}, {"skip": None},
                                      {"skip": nn.Linear}, {"skip": [nn.Linear(2, 2)]}], ids=str)
def test_settings_that_do_not_exist_are_refused(settings):
    model = network()
    with pytest.raises(QuantizationError, match=str(*settings)):
        memopt.quantize_parameters_(model, **settings)
    assert not any(isinstance(p, LowPrecisionTensor) for p in model.parameters())


def test_what_is_no_model_is_refused():
    for convert in (memopt.quantize_parameters_, memopt.dequantize_parameters_):
        with pytest.raises(QuantizationError, match="of type Parameter"):
            convert(nn.Linear(4, 4).weight)


class Closed(nn.Linear):
    """Takes no other weight; or, with `late`, says so when it has taken it."""

    late = closed = False

    def __setattr__(self, name, value):
        if self.closed and not self.late and name == "weight":
            raise RuntimeError("this module is closed")
        super().__setattr__(name, value)
        if self.closed and name == "weight":
            raise RuntimeError("this module is closed")


@pytest.mark.parametrize("late", [False, True])
def test_a_module_that_refuses_its_parameter_leaves_the_others_theirs(late):
    model = nn.Sequential(nn.Linear(4, 4), Closed(4, 4))
    model[1].late, model[1].closed = late, True
    before = dict(model.named_parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(QuantizationError, match="'1.weight' cannot be replaced: this module is closed"):
        memopt.quantize_parameters_(model)
    assert all(p is before[name] for name, p in model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    opt.step()  # its parameters are the model's


def test_a_group_is_no_larger_than_the_parameter():
    """Of a tensor larger than memory, here, if it had to be filled up."""
    model = memopt.quantize_parameters_(nn.Linear(61, 67), group_size=2**50)
    assert (model.weight.form.block, model.bias.form.block) == (61 * 67 + 1, 2048)
    assert model.weight.scales.numel() == 1
    same = memopt.quantize_parameters_(nn.Linear(61, 67), group_size=8192)
    same.load_state_dict(model.state_dict())
    assert all(map(torch.equal, packed(same), packed(model)))


def test_each_seed_draws_for_itself():
    """By all of its 32 bits, and those of 16 bits as ever."""
    def written(seed):
        p = memopt.quantize_parameters_(nn.Linear(64, 64, bias=False), bits=8, seed=seed).weight
        with torch.no_grad():
            p.copy_(torch.linspace(-1, 1, 4096).view(64, 64))
        return p.low

    found = [written(seed) for seed in (0, 1, 2**16, 2**31, 2**32 - 1)]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert noise(torch.arange(4, dtype=torch.int32), 7, 3).tolist() == [30158, 4562, 49053, 8589]


def test_writes():
    p = memopt.quantize_parameters_(nn.Linear(40, 30)).weight
    draws, value = int(p.draws), torch.randn(30, 40)
    with torch.no_grad():
        p.copy_(value)
        assert int(p.draws) == draws + 1
        assert (p.dequantize() - value).abs().max() <= value.abs().max() / 2047 * 1.0001
        p.add_(1.0).mul_(2.0)
        assert (p.dequantize() - (value + 1) * 2).abs().max() <= 6 * value.abs().max() / 2047
        with pytest.raises(QuantizationError, match="by index"):
            p[0] = 1.0
        with pytest.raises(QuantizationError, match="foreach"):
            torch._foreach_add_([p], 1.0)
    with pytest.raises(QuantizationError, match="no memory of its values") as refusal:
        p.storage()  # as safetensors asks
    assert "dequantize_parameters_" in refusal.value.do


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_rounding_loses_what_is_small_and_stochastic_does_not(dtype):
    """Also where the type itself could not tell the new value from the old."""
    moved = {}
    for rounding in ("stochastic", "nearest"):
        p = memopt.quantize_parameters_(nn.Linear(64, 64).to(dtype), bits=8, rounding=rounding).weight
        before, step = p.detach().float().dequantize(), float(p.scales[0]) / 127
        small = before.abs() < before.abs().max() / 2  # the scale stays what it is
        with torch.no_grad():
            for _ in range(50):
                p.add_(torch.where(small, -0.01 * step, 0.0).to(dtype))
        moved[rounding] = float((before - p.detach().float().dequantize())[small].mean() / step)
    assert moved["nearest"] == 0.0 and moved["stochastic"] == pytest.approx(0.5, abs=0.1)


def test_decoding_holds_no_more_than_a_slab():
    p = memopt.quantize_parameters_(nn.Linear(1024, 1024, bias=False)).weight.detach()
    p.dequantize()
    seen = measure(p.dequantize, resident=(p,))
    assert seen.end_bytes == 4 << 20 and seen.transient_peak_bytes <= (4 << 20) + (1 << 20)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_of_the_old_parameters_is_refused(compiled):
    """It would train what no model has any more."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    memopt.quantize_parameters_(model)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    with pytest.raises(QuantizationError, match=r"\(0.weight, 0.bias .*would train nothing") as refusal:
        (memopt.compile(step, lowering="eager") if compiled else step)(torch.randn(4, 8))
    assert "after memopt.quantize_parameters_" in refusal.value.do


def test_looking_for_old_parameters_keeps_no_step_from_being_captured():
    """It is done in a hook for all optimizers, which others than ours prevent."""
    torch._dynamo.reset()
    memopt.quantize_parameters_(nn.Linear(8, 4))
    model = nn.Linear(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    torch.compile(step, backend="memopt", fullgraph=True, options={"lowering": "eager"})(torch.randn(4, 8))
    assert model.weight.grad is None


@pytest.mark.parametrize("compiled", [False, True])
def test_values_are_written_by_data(compiled):
    """PyTorch's setter would leave the codes as they are."""
    torch._dynamo.reset()
    model = memopt.quantize_parameters_(nn.Linear(8, 4), bits=12)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    p = model.weight

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        p.data = torch.full_like(p, 0.25)
        return loss.detach()

    (memopt.compile(step, lowering="eager") if compiled else step)(torch.randn(4, 8))
    assert model.weight is p and (p.dequantize() == 0.25).all()
    if compiled:
        return
    p.data = p.data - 1.0
    assert (p.dequantize() == -0.75).all()
    p.data -= 0.25
    assert (p.dequantize() == -1.0).all()
    whole = torch.linspace(-1, 1, 36)
    nn.utils.vector_to_parameters(whole, model.parameters())
    assert (nn.utils.parameters_to_vector(model.parameters()) - whole).abs().max() < 1 / 2000
    p.detach().apply_(lambda value: 0.5)
    assert (p.dequantize() == 0.5).all()


@pytest.mark.parametrize("value", [torch.ones(8), torch.ones(4, 8).double(), torch.ones(4, 8, device="meta")])
def test_data_of_another_shape_type_or_device_is_refused(value):
    model = memopt.quantize_parameters_(nn.Linear(8, 4))
    before = packed(model)
    with pytest.raises(QuantizationError, match="cannot become"):
        model.weight.data = value
    assert all(map(torch.equal, packed(model), before))


def test_parts_are_shared_between_processes():
    """As by `share_memory` of any module; what is sent to a process is the same memory there."""
    model = memopt.quantize_parameters_(nn.Linear(8, 4))
    assert not model.weight.is_shared()
    assert model.share_memory() is model and model.weight.is_shared() and all(p.is_shared() for p in packed(model))
    sent = pickle.loads(ForkingPickler.dumps(model.weight))
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert isinstance(sent, LowPrecisionTensor) and (sent.dequantize() == 0.5).all()
