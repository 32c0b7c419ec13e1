import re

import pytest
import torch
from graphs import captured, ordinary_step, outcome, two_layers
from torch import nn
from torch._inductor.utils import run_and_get_code

import memopt_compile as memopt
from memopt_compile import records
from memopt_compile.backends import eager
from memopt_compile.measure import measure
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.dequantize_on_use import DequantizeOnUse
from memopt_compile.quantization.operators import DEQUANTIZE
from memopt_compile.step_graph import Phase

WIDTH = 256
LAYER = WIDTH * WIDTH * 4  # bytes of one weight, decoded


def network(layers=2, width=8, tied=False, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.Tanh())))
    if tied:
        model[2].weight = model[0].weight
    return memopt.quantize_parameters_(model, **settings)


def training_step(model, optimizer=torch.optim.SGD, **settings):
    opt = optimizer(model.parameters(), lr=0.1, **settings)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step



def test_golden():
    step = captured(training_step(network()), torch.ones(2, 8))
    Canonicalize().run(step)
    DequantizeOnUse().run(step)
    step.verify()
    assert DequantizeOnUse().ensures(step) is None
    text = step.text()
    assert text[text.index("forward:"):text.index("update:")] == """\
forward:
  dequantize_0: f32[8, 8] = dequantize([p0, p1, p2], linear, 12, 2048, [8, 8], torch.float32)
  t_0: f32[8, 8] = t(dequantize_0)
  mm_0: f32[2, 8] = mm(x0, t_0)
  tanh_0: f32[2, 8] = tanh(mm_0)
  dequantize_1: f32[8, 8] = dequantize([p4, p5, p6], linear, 12, 2048, [8, 8], torch.float32)
  t_1: f32[8, 8] = t(dequantize_1)
  mm_1: f32[2, 8] = mm(tanh_0, t_1)
  tanh_1: f32[2, 8] = tanh(mm_1)
  sum_0: f32[] = sum(tanh_1)
backward:
  full_0: f32[] = full([], 1, device=cpu, dtype=torch.float32, pin_memory=False)
  expand_0: f32[2, 8] = expand(full_0, [2, 8])
  tanh_backward_0: f32[2, 8] = tanh_backward(expand_0, tanh_1)
  t_2: f32[8, 2] = t(tanh_backward_0)
  mm_2: f32[8, 8] = mm(t_2, tanh_0)
  dequantize_2: f32[8, 8] = dequantize([p4, p5, p6], linear, 12, 2048, [8, 8], torch.float32)
  mm_3: f32[2, 8] = mm(tanh_backward_0, dequantize_2)
  tanh_backward_1: f32[2, 8] = tanh_backward(mm_3, tanh_0)
  t_3: f32[8, 2] = t(tanh_backward_1)
  mm_4: f32[8, 8] = mm(t_3, x0)
"""


def readers(step):
    """Phases in which each decoding is read."""
    return {node: [step.phase(u) for u in node.users] for node in step.computing() if node.target is DEQUANTIZE}


def test_forward_backward_and_update_decode_for_themselves():
    step = captured(training_step(network()), torch.ones(2, 8))
    Canonicalize().run(step)
    shared = [phases for phases in readers(step).values() if len(set(phases)) > 1]
    assert DequantizeOnUse().ensures(step) is not None and shared
    DequantizeOnUse().run(step)
    step.verify()
    found = list(readers(step).values())
    assert all(len(set(phases)) == 1 for phases in found)
    count = {phase: sum(phases[0] is phase for phases in found) for phase in Phase}
    # The first layer's input needs no gradient, so its backward does not read its weight.
    assert count == {Phase.FORWARD: 2, Phase.BACKWARD: 1, Phase.UPDATE: 2}


def run(lowering, model, step, x):
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="memopt", options={"lowering": lowering})
    compiled(x)
    return compiled, records.compilations(step.__code__)[-1]


def test_no_copy_lives_from_forward_to_backward():
    """Measured: with ever more layers the peak grows by their activations, a thousandth of a copy."""
    peaks = {}
    for layers in (3, 7):
        model, x = network(layers, WIDTH), torch.ones(4, WIDTH)
        compiled, record = run("eager", model, training_step(model), x)
        assert record.predicted_peak_bytes == record.measured_peak_bytes
        peaks[layers] = measure(compiled, x, resident=(model, x)).transient_peak_bytes
    activations = 4 * WIDTH * 4
    assert peaks[7] - peaks[3] == 4 * activations
    # Of the one layer that is updated: its gradient, its weight, and codes and a slab of the encoding.
    assert peaks[7] <= 2 * LAYER + LAYER * 12 // 32 + 1_500_000


def test_numbers_are_those_without_the_pass():
    for micro in (1, 2):
        model = network(3, 16)
        opt = memopt.optim.AdamW(model.parameters(), lr=0.1, state_bits=8, weight_decay=0.1)

        def step(x, opt=opt, model=model, micro=micro):
            for xs in x.chunk(micro):
                loss = model(xs).square().mean()
                loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        graph = captured(step, torch.ones(4, 16))
        Canonicalize().run(graph)
        generator = torch.Generator().manual_seed(0)
        values = [torch.rand(v.shape, generator=generator, dtype=v.dtype) if v.is_floating_point()
                  else torch.randint(0, 200, v.shape, generator=generator).to(v.dtype)
                  for v in (n.meta["val"] for n in graph.placeholders)]
        expected = outcome(eager.lower(graph), values)
        DequantizeOnUse().run(graph)
        graph.verify()
        assert DequantizeOnUse().ensures(graph) is None
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(expected, outcome(eager.lower(graph), values)))


def test_a_tied_weight_is_decoded_by_each_reader():
    step = captured(training_step(network(3, tied=True)), torch.ones(2, 8))
    Canonicalize().run(step)
    DequantizeOnUse().run(step)
    step.verify()
    found = [phases[0] for phases in readers(step).values()]
    assert [found.count(phase) for phase in Phase] == [3, 2, 2]


def test_what_the_step_returns_stays_as_it_was():
    model = network(1)
    inner = training_step(model)

    def step(x):
        before = model[0].weight * 1.0
        return inner(x), before.detach(), model[0].weight.detach().dequantize()

    values = model[0].weight.detach().dequantize().clone()
    _, before, after = torch.compile(step, backend="memopt", options={"lowering": "eager"})(torch.ones(2, 8))
    assert torch.equal(before, values)
    assert torch.equal(after, model[0].weight.detach().dequantize()) and not torch.equal(after, before)


def test_refuses_a_step_without_such_parameters():
    assert "low precision" in DequantizeOnUse().requires(two_layers())


def test_convolutions_and_norms_train_as_in_eager():
    def losses(lowering):
        torch.manual_seed(0)
        model = memopt.quantize_parameters_(nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)), bits=10)
        opt = memopt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, state_bits=8)
        step = ordinary_step(model, opt)
        if lowering:
            torch._dynamo.reset()
            step = torch.compile(step, backend="memopt", options={"lowering": lowering})
        generator = torch.Generator().manual_seed(1)
        return [float(step(torch.randn(6, 1, 8, 8, generator=generator), torch.arange(6) % 3))
                for _ in range(3)]

    got, wanted = losses("eager"), losses(None)
    assert all(abs(a - b) < 1e-4 * b for a, b in zip(got, wanted))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_decoding_is_part_of_the_kernel_that_reads_it():
    """Of embedding and norm; an operand of cuBLAS, such as a linear layer's weight, would be written first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
    memopt.quantize_parameters_(model, skip="2.*")
    model[:2].requires_grad_(False)
    compiled = torch.compile(training_step(model), backend="memopt")
    _, codes = run_and_get_code(compiled, torch.arange(16, device="cuda"))
    reading_codes = re.findall(r"'in_ptr\d+': '\*u8'.*\n(?:.*\n)*?def (\w+)", "\n".join(codes))
    assert reading_codes and all("embedding" in name and "layer_norm" in name for name in reading_codes)
