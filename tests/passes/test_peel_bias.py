import pytest
import torch
from graphs import by_hand, captured, outcome, values_for
from torch import nn

from memopt_compile import costs
from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.peel_bias import PeelBias

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def for_biases(node):
    """Workspace as if only the bias needed any, so that the pass has a reason everywhere."""
    biased = node.target is torch.ops.aten.convolution.default and node.args[2] is not None
    return 1 << 30 if biased else 0


def conv(x, w, b):
    return torch.ops.aten.convolution.default(x, w, b, [1], [1], [1], False, [0], 1)


def step_of(conv, dtype=torch.float32):
    return by_hand(lambda w, b, x: torch.relu(conv(x, w, b)), ("p", torch.rand(8, 3, 3, dtype=dtype)),
                   ("p", torch.rand(8, dtype=dtype)), ("x", torch.rand(2, 3, 4, dtype=dtype)))


def test_golden():
    step = step_of(conv)
    PeelBias().run(step, for_biases)
    step.verify()
    assert (
        step.text()
        == """\
p0: f32[8, 3, 3]  # parameter trained
p1: f32[8]  # parameter trained
x0: f32[2, 3, 4]  # batch
forward:
  convolution_0: f32[2, 8, 4] = convolution(x0, p0, None, [1], [1], [1], False, [0], 1)
  view_0: f32[8, 1] = view(p1, [8, 1])
  add_0: f32[2, 8, 4] = add(convolution_0, view_0)
  relu_0: f32[2, 8, 4] = relu(add_0)
return relu_0
"""
    )


def test_taken_back_where_the_peak_does_not_fall():
    step = by_hand(lambda w, b, x: (torch.relu(conv(x, w, b)), x.expand(1000, 2, 3, 4).clone().sum()),
                   ("p", torch.rand(8, 3, 3)), ("p", torch.rand(8)), ("x", torch.rand(2, 3, 4)))
    text = step.text()
    PeelBias().run(step, lambda node: for_biases(node) >> 28)
    assert step.text() == text


def test_nothing_to_do_where_workspace_is_not_known():
    step = step_of(conv)
    text = step.text()
    PeelBias().run(step)
    assert step.text() == text


@pytest.mark.parametrize("step", [step_of(conv, torch.bfloat16), step_of(lambda x, w, b: conv(x, w, None))])
def test_refuses_low_precision_and_what_has_no_bias(step):
    assert "bias" in PeelBias().requires(step)


def training(layer, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(layer(6, 5, 3, stride=2), nn.GELU(), layer(5, 4, 2)).to(dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    step = captured(train, torch.rand(3, 6, *[9] * int(layer.__name__[-2]), dtype=dtype))
    Canonicalize().run(step)
    return step


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_a_net_trains_alike(layer):
    step = training(layer, torch.float64)
    values = values_for(step)
    expected = outcome(eager.lower(step), values)
    PeelBias().run(step, for_biases)
    step.verify()
    assert step.op_counts()["add"] >= 2
    for a, b in zip(expected, outcome(eager.lower(step), values), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# Without oneDNN a convolution needs as much with a bias as without.
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_workspace_goes():
    step = training(nn.ConvTranspose3d, torch.float32)
    workspace = costs.workspace(step)
    before = timeline(step, workspace).peak_bytes
    PeelBias().run(step, workspace)
    after = timeline(step, workspace).peak_bytes
    # oneDNN's kernels for a processor without AVX-512 may have none to begin with.
    assert after < before or after == before and torch.backends.cpu.get_cpu_capability() != "AVX512"
