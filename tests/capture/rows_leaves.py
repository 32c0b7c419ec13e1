"""Steps that make a leaf of their own by `requires_grad_()`. Dynamo of torch before 2.12 refuses that call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loops import CLASSES, WIDTH, Loop, adamw, loop, mlp, ordinary, row
from torch import Tensor, nn
from torch.torch_version import TorchVersion

leaf_row = row if TorchVersion(torch.__version__) >= "2.12" else ordinary


@leaf_row
def gradient_penalty() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        x = x.clone().requires_grad_(True)
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@leaf_row
def critic_between_two_batches() -> Loop:
    """WGAN-GP (arXiv 1704.00028): the critic's slope is held at one between real and made examples."""
    maker, critic = mlp(), nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
    opts = [torch.optim.RMSprop(model.parameters(), lr=1e-2) for model in (critic, maker)]

    def step(x, y):
        real = F.one_hot(y, CLASSES).to(x.dtype)
        made = maker(x)
        share = torch.rand(len(x), 1)
        between = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(made.detach()).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        opts[0].zero_grad()
        loss.backward()
        opts[0].step()
        opts[1].zero_grad()
        (-critic(made)).mean().backward()
        opts[1].step()
        return loss

    return Loop(step, [maker, critic], opts)


def attacked(attack) -> Loop:
    """Trains on inputs that `attack(model, x, y)` has moved."""
    model = mlp()
    opt = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        moved = attack(model, x, y)
        opt.zero_grad()
        loss = F.cross_entropy(model(x + moved.detach()), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return loop(model, opt, step)


@leaf_row
def projected_attack() -> Loop:
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        moved = torch.zeros_like(x).uniform_(-0.1, 0.1)
        for _ in range(3):
            moved = moved.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x + moved), y), moved)
            moved = (moved + 0.03 * slope.sign()).clamp(-0.1, 0.1)
        return moved

    return attacked(attack)


@leaf_row
def attack_in_place() -> Loop:
    """The parameters' gradients of the attack are thrown away by the step's zero_grad()."""
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        moved = torch.empty_like(x).uniform_(-0.1, 0.1).requires_grad_()
        for _ in range(3):
            F.cross_entropy(model(x + moved), y).backward()
            with torch.no_grad():
                moved.add_(moved.grad.sign(), alpha=0.03).clamp_(-0.1, 0.1)
            moved.grad.zero_()
        return moved

    return attacked(attack)


@leaf_row
def attack_with_inputs_named() -> Loop:
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        moved = torch.zeros_like(x).requires_grad_()
        F.cross_entropy(model(x + moved), y).backward(inputs=[moved])
        return 0.1 * moved.grad

    return attacked(attack)


@leaf_row
def queries_that_start_as_a_leaf_of_zeros() -> Loop:
    """As detectors of the DETR family (arXiv 2005.12872) make them, in the middle of the model."""
    body, head = mlp(), nn.Linear(CLASSES, CLASSES)
    opt = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.02)

    def step(x, y):
        features = body(x)
        queries = torch.zeros_like(features, requires_grad=body.training)
        loss = F.cross_entropy(head(features + queries.tanh()), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, queries.grad

    return Loop(step, [body, head], [opt])


@leaf_row
def backward_in_two_parts() -> Loop:
    body, head = mlp(), nn.Linear(CLASSES, CLASSES)
    opts = [adamw(body), adamw(head)]

    def step(x, y):
        features = body(x)
        cut = features.detach().requires_grad_()
        loss = F.cross_entropy(head(cut), y)
        loss.backward()
        features.backward(cut.grad)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        return loss, cut.grad

    return Loop(step, [body, head], opts)
