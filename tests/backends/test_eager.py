"""What the eager lowering does beyond running operators in order."""

import torch
from torch import nn

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
