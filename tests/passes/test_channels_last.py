import pytest
import torch
from graphs import by_hand, captured, outcome, values_for
from torch import nn
from torch.nn import functional as F

from memopt_compile import costs
from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.channels_last import ChannelsLast

# Without oneDNN a convolution works in the ordinary layout and has no such copies.
needs_mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def always(node):
    """Workspace that the ordinary layout costs, so that the pass has a reason everywhere."""
    if node.target is not torch.ops.aten.convolution.default:
        return 0
    return 0 if node.args[0].meta["val"].stride()[1] == 1 else 1 << 30


def conv(x, w):
    return torch.ops.aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def floats(*shape):
    return torch.rand(shape) - 0.5


def test_golden():
    def net(w, x):
        hidden = torch.relu(conv(x, w))
        return hidden.mean((2, 3)), torch.ops.aten.view(hidden, [2, 128])

    step = by_hand(net, ("p", floats(8, 3, 3, 3)), ("x", floats(2, 3, 4, 4)))
    ChannelsLast().run(step, always)
    step.verify()
    assert (
        step.text()
        == """\
p0: f32[8, 3, 3, 3]  # parameter trained
x0: f32[2, 3, 4, 4]  # batch
forward:
  clone_0: f32[2, 3, 4, 4] = clone(x0, memory_format=torch.channels_last)
  convolution_0: f32[2, 8, 4, 4] = convolution(clone_0, p0, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
  relu_0: f32[2, 8, 4, 4] = relu(convolution_0)
  mean_0: f32[2, 8] = mean.dim(relu_0, [2, 3])
  clone_1: f32[2, 8, 4, 4] = clone(relu_0, memory_format=torch.contiguous_format)
  view_0: f32[2, 128] = view(clone_1, [2, 128])
return mean_0, view_0
"""
    )


def test_taken_back_where_it_saves_nothing():
    step = by_hand(lambda w, x: torch.relu(conv(x, w)).sum(), ("p", floats(8, 3, 3, 3)),
                   ("x", floats(2, 3, 4, 4)))
    text, strides = step.text(), [n.meta["val"].stride() for n in step.computing()]
    ChannelsLast().run(step)  # no workspace known, so the copy only costs
    assert step.text() == text
    assert [n.meta["val"].stride() for n in step.computing()] == strides


def test_refuses_a_graph_without_convolutions():
    assert "no convolution" in ChannelsLast().requires(by_hand(lambda x: x.sin(), ("x", floats(4))))


def test_refuses_what_is_channels_last_already():
    x = floats(2, 3, 4, 4).to(memory_format=torch.channels_last)
    step = by_hand(lambda w, x: conv(x, w), ("p", floats(8, 3, 3, 3)), ("x", x))
    assert "no convolution" in ChannelsLast().requires(step)


def test_results_and_random_numbers_keep_their_layout():
    def net(w, x):
        hidden = conv(x, w)
        return hidden, hidden * torch.ops.aten.bernoulli.p(hidden, 0.5)

    step = by_hand(net, ("p", floats(8, 3, 3, 3)), ("x", floats(2, 3, 4, 4)))
    values = values_for(step)
    expected = outcome(eager.lower(step), values)
    ChannelsLast().run(step, always)
    step.verify()
    for a, b in zip(expected, outcome(eager.lower(step), values)):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def net(dimensions=2):
    layer, norm = (nn.Conv2d, nn.BatchNorm2d) if dimensions == 2 else (nn.Conv3d, nn.BatchNorm3d)
    pool = nn.MaxPool2d(2) if dimensions == 2 else nn.AvgPool3d(2)
    torch.manual_seed(0)
    return nn.Sequential(layer(1, 8, 3, padding=1), norm(8), nn.ReLU(), layer(8, 8, 3, padding=1),
                         nn.ReLU(), pool, nn.Dropout(0.3), layer(8, 16, 3, stride=2), nn.GELU(),
                         nn.Flatten(), nn.LazyLinear(4))


def captured_net(dimensions, dtype):
    model = net(dimensions)
    x, y = floats(8, 1, *[12] * dimensions), torch.zeros(8, dtype=torch.int64)
    model(x)
    model, x = model.to(dtype), x.to(dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    step = captured(train, x, y)
    Canonicalize().run(step)
    return step


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_net_trains_alike(dimensions):
    step = captured_net(dimensions, torch.float64)
    values = values_for(step)
    expected = outcome(eager.lower(step), values)
    copies = step.op_counts().get("clone", 0)
    ChannelsLast().run(step, always)
    step.verify()
    assert step.op_counts()["clone"] > copies
    for a, b in zip(expected, outcome(eager.lower(step), values), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@needs_mkldnn
@pytest.mark.parametrize("dimensions", [2, 3])
def test_workspace_goes(dimensions):
    step = captured_net(dimensions, torch.float32)
    workspace = costs.workspace(step)
    before = timeline(step, workspace).peak_bytes
    ChannelsLast().run(step, workspace)
    after = timeline(step, workspace).peak_bytes
    # oneDNN's kernels for a processor without AVX-512 may have none to begin with.
    assert after < before or after == before and torch.backends.cpu.get_cpu_capability() != "AVX512"
