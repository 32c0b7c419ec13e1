"""Numbers read off tensors that constants make are known while a step is traced; those of any other are not."""

import pytest
import torch
from harness import compiled, largest_difference, train
from rows import loop, mlp


def built(read):
    """A training loop whose loss is weighed by the numbers that `read` gives."""
    def build():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            first, second = read(x)
            loss = (first + 2 * second) * torch.nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        return loop(model, opt, step)

    return build


def off_the_diagonal(x):
    """As contrastive losses have it."""
    names = torch.arange(len(x) // 2).repeat(2)
    same, others = (names[None] == names[:, None]).float(), ~torch.eye(len(x), dtype=torch.bool)
    alike = (x @ x.t())[others].view(len(x), -1)
    same = same[others].view(len(x), -1)
    return alike[same.bool()].view(len(x), -1).mean(), alike[~same.bool()].view(len(x), -1).logsumexp(1).mean()


def written(x):
    count = torch.zeros(2, dtype=torch.int64)
    count[0] = 3
    count.add_(1)
    return count.tolist()


@pytest.mark.parametrize(("read", "whole"), [
    (lambda x: torch.arange(1, 1 + x.dim()).tolist(), True),
    (lambda x: (torch.eye(3, dtype=torch.int64).sum().item(), int(torch.tensor([4, 5])[1].item())), True),
    (off_the_diagonal, True),
    (written, True),
    (lambda x: torch.randperm(5)[:2].tolist(), False),
    (lambda x: (x > 0).sum(dim=1)[:2].tolist(), False),
    (lambda x: torch.linspace(0.1, 0.3, 2).tolist(), True),
], ids=["axes", "items", "masks", "written", "drawn", "of the batch", "fractions"])
def test_numbers_of_constants(read, whole):
    expected = train(built(read))
    got, compilations = compiled(built(read), until=7)
    difference, where = largest_difference(expected, got)
    assert difference <= 1e-12, where
    assert (not any(c.kind != "step" or c.reason for c in compilations)) is whole
