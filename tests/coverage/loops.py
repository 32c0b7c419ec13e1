"""Training loops that are not one backward and one update: held against eager, without a budget and under the smallest.

    python tests/coverage/loops.py [--only NAME ...] [--lowering inductor]

Small models in float64 with dropout (most of them); the difference is the largest of anything that training changes (results, parameters, states,
buffers, random numbers) after five steps, from eager's; Inductor draws eager's random numbers for it (`fallback_random`). The
smallest budget is what a refusal of one byte names.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from check import Case, Row, Training, forget, run  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._inductor import config  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

import memopt_compile as memopt  # noqa: E402

WORDS, TOKENS, DROPOUT = 300, 16, 0.1
HEAD = ("loop", "eager", "memopt", "difference", "smallest budget", "measured", "difference")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(DROPOUT)
        self.attend = nn.MultiheadAttention(width, 4, DROPOUT, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.drop(self.attend(h, h, h, need_weights=False)[0])
        return x + self.drop(self.narrow(F.gelu(self.wide(self.second(x)))))


class Language(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, width), nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head, self.value = nn.Linear(width, WORDS), nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def encoder(width: int = 32) -> nn.Sequential:
    def convolution(channels: int, stride: int = 1) -> Iterator[nn.Module]:
        yield from (nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())

    return nn.Sequential(*convolution(3), nn.Dropout(DROPOUT), *convolution(width, 2), *convolution(width),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 32))


def images() -> Tensor:
    return torch.randn(6, 3, 16, 16)


def tokens() -> Tensor:
    return torch.randint(WORDS, (4, TOKENS))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.05, momentum=0.9)


def adamw(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)


def gan() -> Training:
    """Two losses of the discriminator, its update, and through it as it is then the generator's."""
    def up(to: int, of: int, stride: int, padding: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(of, to, 4, stride, padding, bias=False), nn.BatchNorm2d(to), nn.ReLU()]

    generator = nn.Sequential(*up(32, 16, 1, 0), *up(16, 32, 2, 1), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
    critic = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1, bias=False),
                           nn.BatchNorm2d(32), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4), nn.Flatten(0))
    opts, judged = (sgd(generator), sgd(critic)), F.binary_cross_entropy_with_logits

    def step(real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        opts[1].zero_grad()
        judged(critic(real), torch.ones(len(real))).backward()
        fake = generator(noise)
        loss = judged(critic(fake.detach()), torch.zeros(len(fake)))
        loss.backward()
        opts[1].step()
        opts[0].zero_grad()
        fooled = judged(critic(fake), torch.ones(len(fake)))
        fooled.backward()
        opts[0].step()
        return loss.detach(), fooled.detach()

    return Training(step, [generator, critic], list(opts), lambda i: (images(), torch.randn(6, 16, 1, 1)))


def gradient_penalty() -> Training:
    """WGAN-GP: the norm of a gradient is in the critic's loss."""
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 768), nn.Tanh())
    critic = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    opts = adamw(generator), adamw(critic)

    def step(real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        real, fake = real.flatten(1), generator(noise).detach()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        opts[1].step()
        opts[1].zero_grad()
        fooled = -critic(generator(noise)).mean()
        fooled.backward()
        opts[0].step()
        opts[0].zero_grad()
        opts[1].zero_grad()
        return loss.detach(), fooled.detach()

    return Training(step, [generator, critic], list(opts), lambda i: (images(), torch.randn(6, 16)))


def queue_of_keys() -> Training:
    """MoCo: a second encoder follows the first, and its results wait in a buffer."""
    query = encoder()
    query.register_buffer("queue", F.normalize(torch.randn(32, 64), dim=0))
    key = copy.deepcopy(query).requires_grad_(False)
    opt = sgd(query)

    def step(one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            for follower, leader in zip(key.parameters(), query.parameters()):
                follower.mul_(0.99).add_(leader, alpha=0.01)
            keys = F.normalize(key(other), dim=1)
        queries = F.normalize(query(one), dim=1)
        right = (queries * keys).sum(1, keepdim=True)
        wrong = queries @ query.queue.clone()
        loss = F.cross_entropy(torch.cat([right, wrong], 1) / 0.2, torch.zeros(len(one), dtype=torch.long))
        loss.backward()
        opt.step()
        opt.zero_grad()
        query.queue.copy_(torch.cat([keys.t(), query.queue[:, :-len(one)]], 1))
        return loss.detach()

    return Training(step, [query, key], [opt], lambda i: (images(), images()))


def two_views() -> Training:
    """BYOL: each view predicts the other's by a mean of the weights, which moves behind the update."""
    online, predict = encoder(), nn.Linear(32, 32)
    mean, opt = copy.deepcopy(online).requires_grad_(False), sgd(online, predict)

    def step(one: Tensor, other: Tensor) -> Tensor:
        loss = torch.zeros(())
        for seen, hidden in ((one, other), (other, one)):
            with torch.no_grad():
                target = F.normalize(mean(hidden), dim=-1)
            loss = loss + 2 - 2 * (F.normalize(predict(online(seen)), dim=-1) * target).sum(-1).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(online.parameters()), 0.01)
        return loss.detach()

    return Training(step, [online, predict, mean], [opt], lambda i: (images(), images()))


def sharpness_aware() -> Training:
    """SAM: the gradient is of weights that a first one has moved, and that are moved back."""
    model = Language()
    opt, trained = sgd(model), [p for n, p in model.named_parameters() if not n.startswith("value")]

    def step(x: Tensor) -> Tensor:
        model.loss(x).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in trained]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in trained]
            for p, move in zip(trained, moves):
                p.add_(move)
        opt.zero_grad()
        loss = model.loss(x)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(trained, moves):
                p.sub_(move)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], [opt], lambda i: (tokens(),))


def policy() -> Training:
    """PPO: two updates by the same samples, and log-probabilities from before both."""
    model = Language()
    opt = adamw(model)

    def said(z: Tensor, x: Tensor) -> Tensor:
        return z.log_softmax(-1)[:, :-1].gather(2, x[:, 1:, None]).squeeze(-1)

    def step(x: Tensor, advantage: Tensor, worth: Tensor) -> Tensor:
        with torch.no_grad():
            before = said(model(x), x)
        for _ in range(2):
            hidden = model.blocks(model.embed(x))
            ratio = (said(model.head(hidden), x) - before).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = F.mse_loss(model.value(hidden)[:, :-1, 0], worth) / 2 - gain
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return Training(step, [model], [opt], lambda i: (tokens(), torch.randn(4, TOKENS - 1), torch.randn(4, TOKENS - 1)))


def projected() -> Training:
    """PCGrad: gradients of two losses, each without what it takes from the other."""
    model, heads = encoder(), nn.ModuleList([nn.Linear(32, 5), nn.Linear(32, 7)])
    opt, shared = sgd(model, heads), list(model.parameters())

    def step(x: Tensor, *targets: Tensor) -> Tensor:
        found = model(x)
        losses = [F.cross_entropy(head(found), y) for head, y in zip(heads, targets)]
        grads = []
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i == 0)
            grads.append([p.grad.clone() for p in shared])
            for p in shared:
                p.grad = None
        against = sum((a * b).sum() for a, b in zip(*grads)).clamp(max=0.0)
        one, other = (sum((g * g).sum() for g in of) for of in grads)
        for p, a, b in zip(shared, *grads):
            p.grad = a - against / other * b + b - against / one * a
        opt.step()
        opt.zero_grad()
        return torch.stack(losses).detach()

    return Training(step, [model, heads], [opt], lambda i: (images(), torch.randint(5, (6,)), torch.randint(7, (6,))))


def noise() -> Training:
    """Diffusion: times and noise are drawn in the step; a mean of the weights follows."""
    def block(of: int, to: int) -> list[nn.Module]:
        return [nn.Conv2d(of, to, 3, padding=1), nn.GroupNorm(4, to), nn.SiLU(), nn.Dropout(DROPOUT)]

    model = nn.Sequential(*block(3, 32), *block(32, 32), nn.Conv2d(32, 3, 3, padding=1))
    mean, opt, kept = copy.deepcopy(model).requires_grad_(False), adamw(model), torch.linspace(0.99, 0.01, 100)

    def step(x: Tensor) -> Tensor:
        share = kept[torch.randint(100, (len(x),))][:, None, None, None]
        drawn = torch.randn_like(x)
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * drawn), drawn)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for follower, leader in zip(mean.parameters(), model.parameters()):
                follower.lerp_(leader, 0.01)
        return loss.detach()

    return Training(step, [model, mean], [opt], lambda i: (images(),))


def adapted_inside() -> Training:
    """MAML: the loss of weights after a step on each task, by second derivatives."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = torch.zeros(())
        for given, wanted in zip(x, y):
            weights = dict(model.named_parameters())
            first = F.mse_loss(torch.func.functional_call(model, weights, (given,)), wanted)
            grads = torch.autograd.grad(first, list(weights.values()), create_graph=True)
            moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads)}
            loss = loss + F.mse_loss(torch.func.functional_call(model, moved, (given + 1,)), wanted)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], [opt], lambda i: (torch.randn(3, 64, 8), torch.randn(3, 64, 1)))


def cached_gradients() -> Training:
    """GradCache: a contrastive loss of all samples, whose gradient each chunk's forward is then run for."""
    model = encoder().eval()  # as forward runs twice
    opt = sgd(model)

    def step(one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            views = [torch.cat([model(chunk) for chunk in of.split(2)]) for of in (one, other)]
        first, second = (view.requires_grad_() for view in views)
        loss = F.cross_entropy(first @ second.t(), torch.arange(len(one)))
        loss.backward()
        for of, view in ((one, first), (other, second)):
            for chunk, grad in zip(of.split(2), view.grad.split(2)):
                (model(chunk) * grad).sum().backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], [opt], lambda i: (images(), images()))


def lookahead() -> Training:
    """Two updates, by other samples, and then half of the way from the slow weights."""
    model = Language()
    slow, opt = copy.deepcopy(model).requires_grad_(False), adamw(model)

    def step(*batches: Tensor) -> Tensor:
        for x in batches:
            loss = model.loss(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            for behind, p in zip(slow.parameters(), model.parameters()):
                behind.lerp_(p, 0.5)
                p.copy_(behind)
        return loss.detach()

    return Training(step, [model, slow], [opt], lambda i: (tokens(), tokens()))


LOOPS: dict[str, Callable[[], Training]] = {
    "GAN": gan, "WGAN-GP": gradient_penalty, "MoCo": queue_of_keys, "BYOL": two_views, "SAM": sharpness_aware, "PPO": policy,
    "PCGrad": projected, "diffusion": noise, "MAML": adapted_inside, "GradCache": cached_gradients, "Lookahead": lookahead}


def smallest(build: Callable[[], Training], lowering: str) -> int:
    """The peak in bytes that a refusal names."""
    forget()
    torch.set_default_dtype(torch.float64)
    try:
        training = build()
        memopt.explain(training.step, *training.batch(0), lowering=lowering, memory_budget=1)
    except memopt.InfeasibleBudget as refusal:
        return refusal.smallest_peak_bytes
    finally:
        torch.set_default_dtype(torch.float32)
    raise AssertionError("one byte is enough")


def row(name: str, lowering: str) -> list[str]:
    case = Case(name, LOOPS[name])
    free, least = run(case, lowering=lowering), smallest(case.build, lowering)
    kept = run(case, lowering=lowering, memory_budget=least)
    for each in (free, kept):
        if each.error or not each.right or not each.whole:
            raise SystemExit(f"{name}: {each.error or each.where or each.reasons}")
    return [name, f"{free.eager_peak:,}", f"{free.measured:,}" + _unlike(free), f"{free.difference:.0e}",
            f"{least:,}", f"{kept.measured:,}" + _unlike(kept), f"{kept.difference:.0e}"]


def _unlike(row: Row) -> str:
    return "" if row.predicted == row.measured else f" ({row.predicted:,} predicted)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in given.only:
        with config.patch(fallback_random=given.lowering == "inductor"):
            rows.append(row(name, given.lowering))
        print(tabulate(rows[-1:], tablefmt="plain"), flush=True)
    print(tabulate(rows, HEAD, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
