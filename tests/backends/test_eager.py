"""What the eager lowering does beyond running operators in order."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt
from memopt_compile import records
from memopt_compile.backends.eager import in_layout


def test_a_layout_that_matters_is_restored():
    value = torch.arange(6.0).reshape(2, 3)
    assert in_layout(value, (3, 1)) is value
    restored = in_layout(value, (1, 2))
    assert restored.stride() == (1, 2) and torch.equal(restored, value)


def test_strides_of_single_elements_do_not_matter():
    value = torch.zeros(1, 3)
    assert in_layout(value, (7, 1)) is value


def test_batch_norm_of_a_transposed_tensor():
    """Its fake version promises the operand's layout, its kernel returns another (torch 2.13)."""
    torch.manual_seed(0)
    norm, head = nn.BatchNorm1d(4).double(), nn.Linear(4, 2).double()
    opt = torch.optim.SGD([*norm.parameters(), *head.parameters()], lr=0.1)

    def step(x):
        hidden = norm(x.transpose(1, 2)).transpose(1, 2)
        loss = head(hidden.reshape(-1, 4)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    x = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = [step(x).item() for _ in range(3)]
    torch.manual_seed(0)
    for parameter, fresh in zip(
            [*norm.parameters(), *head.parameters()],
            [*nn.BatchNorm1d(4).double().parameters(), *nn.Linear(4, 2).double().parameters()]):
        parameter.data.copy_(fresh)
    compiled = torch.compile(step, backend="memopt", options={"lowering": "eager"}, fullgraph=True)
    got = [compiled(x).item() for _ in range(3)]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)


def test_interpolation_is_one_operator():
    """torch splits it, for every compiler that fuses the parts again."""
    parameter = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    opt = torch.optim.SGD([parameter], lr=0.1)

    def step():
        loss = F.interpolate(parameter, scale_factor=2, mode="bilinear").square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    start = parameter.detach().clone()
    expected = [step().item() for _ in range(3)]
    parameter.data.copy_(start)
    splits = dict(torch.ops.aten.upsample_bilinear2d.vec.py_kernels)
    compiled = torch.compile(step, backend="memopt", options={"lowering": "eager"}, fullgraph=True)
    torch.testing.assert_close([compiled().item() for _ in range(3)], expected, rtol=1e-12, atol=0)
    counts = records.compilations(step.__code__)[-1].step.op_counts()
    assert counts["upsample_bilinear2d"] == counts["upsample_bilinear2d_backward"] == 1
    assert dict(torch.ops.aten.upsample_bilinear2d.vec.py_kernels) == splits


def test_a_tuple_does_not_hold_what_was_taken_from_it():
    """Running statistics are read long after the normalized values of the same operator are dead."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16),
                                                          nn.ReLU())], nn.Linear(16, 2)).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        for inputs, labels in memopt.micro_batches(2, x, y):
            (F.cross_entropy(model(inputs), labels) / 2).backward()
        opt.step()
        opt.zero_grad()

    fast = memopt.compile(step, lowering="eager")
    fast(torch.randn(512, 16).double(), torch.zeros(512, dtype=torch.int64))
    report = memopt.report(fast)
    assert report.measured_peak_bytes == report.predicted_peak_bytes


@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(32, 32)), (4, 32)),
    (lambda: nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((16, 16), 3, padding=1), nn.Conv2d(2, 8, 3)), (4, 2, 16, 16)),
], ids=["a matrix exponential, which holds fewer matrices for small numbers", "col2im, which keeps its columns' bytes"])
def test_what_kernels_hold_is_predicted(make, shape):
    torch._dynamo.reset()  # or sizes are symbols, since the other case had others
    torch.manual_seed(0)
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()

    x = torch.randn(shape)
    compiled = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    for _ in range(2):
        compiled(x)
    report = memopt.report(compiled)
    assert report.predicted_peak_bytes == report.measured_peak_bytes


def test_dropout_behind_a_transposed_gradient():
    """The fake version of its backward promises a contiguous result, the kernel keeps the gradient's layout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).transpose(1, 2).contiguous().exp().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    x, start = torch.randn(3, 5, 4, dtype=torch.float64), [p.detach().clone() for p in model.parameters()]
    trained = []
    for run in (step, torch.compile(step, backend="memopt", options={"lowering": "eager"})):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), start)
        torch.manual_seed(1)
        run(x)
        trained.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*trained)
