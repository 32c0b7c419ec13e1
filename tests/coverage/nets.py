"""Networks of kinds that Hugging Face has not: convolutional, recurrent, generative, in two parts, frozen, masked.

Each is a function that makes a model and its loss of a batch (or its losses), sized so that activations outweigh parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from check import Training
from torch import Tensor, nn

import memopt_compile as memopt

Made = tuple[nn.Module, Callable[..., Tensor | tuple[Tensor, ...]], tuple]


class Residual(nn.Module):
    """Normalization, activation and convolution, twice, with what a time adds in between (diffusion)."""

    def __init__(self, inputs: int, outputs: int, times: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)])
        self.convs = nn.ModuleList([nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)])
        self.time = nn.Linear(times, outputs) if times else None
        self.dropout, self.skip = nn.Dropout(dropout), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        hidden = self.convs[0](F.silu(self.norms[0](x)))
        if self.time is not None:
            hidden = hidden + self.time(time)[:, :, None, None]
        return self.skip(x) + self.convs[1](self.dropout(F.silu(self.norms[1](hidden))))


class Attention(nn.Module):
    """Among the places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.GroupNorm(4, width), nn.Conv1d(width, 3 * width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x).flatten(2)).chunk(3, 1)
        weights = (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(-1)
        return x + self.outer(v @ weights.transpose(1, 2)).view_as(x)


class UNet(nn.Module):
    """Three resolutions; with `times` it is told how noisy its image is, and attends at the lowest."""

    def __init__(self, channels: int, outputs: int, width: int = 8, times: int = 0) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(a, b, times, 0.1) for a, b in zip([width, *widths], widths)])
        self.middle = Attention(widths[-1]) if times else nn.Identity()
        self.up = nn.ModuleList([Residual(a + b, b, times, 0.1) for a, b in zip(
            [widths[-1], *widths[:0:-1]], widths[::-1])])
        self.last = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1), time)
        return self.last(x)


def unet() -> Made:
    model = UNet(3, 4)
    return model, lambda x, y: F.cross_entropy(model(x), y), (torch.randn(8, 3, 32, 32), torch.randint(4, (8, 32, 32)))


def diffusion() -> Made:
    model = UNet(3, 3, times=16)

    def loss(x: Tensor, time: Tensor) -> Tensor:
        noise, share = torch.randn_like(x), time[:, None, None, None]
        waves = (time[:, None] * torch.arange(1, 9)).mul(3).unsqueeze(-1)
        told = torch.cat([waves.sin(), waves.cos()], -1).flatten(1).to(x.dtype)
        return F.mse_loss(model((1 - share).sqrt() * x + share.sqrt() * noise, told), noise)

    return model, loss, (torch.randn(8, 3, 32, 32), torch.rand(8))


class Recurrent(nn.Module):
    def __init__(self, kind: type, layers: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.cells = kind(32, 48, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(96 if bidirectional else 48, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.cells(self.embed(x))[0], 0.1, self.training))


def recurrent(kind: type, layers: int, bidirectional: bool = False) -> Made:
    model = Recurrent(kind, layers, bidirectional)
    tokens = torch.randint(40, (32, 12))
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), (tokens, tokens.roll(-1, 1))


def by_hand() -> Made:
    """A recurrence that is a loop of the user's, 40 turns with one cell."""
    cell, head = nn.GRUCell(16, 64), nn.Linear(64, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 64)
        for part in x.unbind(1):
            state = cell(part, state)
        return F.cross_entropy(head(state), y)

    return nn.ModuleList([cell, head]), loss, (torch.randn(64, 40, 16), torch.randint(4, (64,)))


class Experts(nn.Module):
    """The best two of four, each of which computes with all tokens (no size depends on data)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                     for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.gate(x).topk(2, -1)
        weights = torch.zeros_like(x[..., :4]).scatter(-1, which, best.softmax(-1))
        return x + sum(weights[..., i:i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Routed(Experts):
    """Each of which computes with its own tokens, as many as they are."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best, which = self.gate(flat).topk(2, -1)
        total, weights = flat, best.softmax(-1)
        for i, expert in enumerate(self.experts):
            rows, place = (which == i).nonzero(as_tuple=True)
            total = total.index_add(0, rows, expert(flat[rows]) * weights[rows, place].unsqueeze(1))
        return total.view_as(x)


def experts(kind: type) -> Made:
    model = nn.Sequential(nn.Embedding(50, 32), *(m for _ in range(4) for m in (nn.LayerNorm(32), kind(32), nn.Dropout(0.1))),
                          nn.Linear(32, 50))
    tokens = torch.randint(50, (8, 32))
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), (tokens, tokens.roll(-1, 1))


def transformer(layers: int = 4, width: int = 32, norm_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def translation() -> Made:
    model = nn.Transformer(32, 4, 3, 3, 64, 0.1, batch_first=True)
    embed, head = nn.Embedding(60, 32), nn.Linear(32, 60)
    mask = nn.Transformer.generate_square_subsequent_mask(16)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(model(embed(x), embed(y), tgt_mask=mask.to(x.device))).flatten(0, 1), y.flatten())

    return nn.ModuleList([model, embed, head]), loss, (torch.randint(60, (16, 24)), torch.randint(60, (16, 16)))


def towers() -> Made:
    """Contrastive: images on one side, texts on the other, and all pairs of them in the loss."""
    images = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2))
    sight, text, words = transformer(3, 16), transformer(3, 32), nn.Embedding(50, 32)
    heads = nn.ModuleList([nn.Linear(16, 24), nn.Linear(32, 24)])
    scale = nn.Parameter(torch.tensor(2.0))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        a = F.normalize(heads[0](sight(images(x).transpose(1, 2)).mean(1)), dim=-1)
        b = F.normalize(heads[1](text(words(y)).mean(1)), dim=-1)
        logits, right = scale.exp() * a @ b.T, torch.arange(x.shape[0])
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2

    model = nn.ModuleList([images, sight, text, words, heads])
    model.scale = scale
    return model, loss, (torch.randn(32, 3, 16, 16), torch.randint(50, (32, 16)))


def vae() -> Made:
    encode = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(),
                           nn.Linear(32 * 49, 16))
    decode = nn.Sequential(nn.Linear(8, 32 * 49), nn.ReLU(), nn.Unflatten(1, (32, 7, 7)),
                           nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
                           nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def loss(x: Tensor) -> Tensor:
        mean, log_var = encode(x).chunk(2, 1)
        back = decode(mean + torch.randn_like(mean) * (log_var / 2).exp())
        return F.binary_cross_entropy_with_logits(back, x.sigmoid()) - (1 + log_var - mean**2 - log_var.exp()).mean() / 2

    return nn.ModuleList([encode, decode]), loss, (torch.randn(64, 1, 28, 28),)


def autoregressive(loss_of: Callable[[Tensor, Tensor], Tensor], vocabulary: int = 200) -> Made:
    """Tokens masked as the data say."""
    body, words, head = transformer(6), nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)
    tokens = torch.randint(vocabulary, (16, 32))
    return (nn.ModuleList([body, words, head]), lambda x, y: loss_of(head(body(words(x))), y),
            (tokens, torch.where(torch.rand(16, 32) < 0.3, tokens, -100)))


def padded() -> Made:
    """Attention that leaves out the padding of each row, by a mask made of the data."""
    body, words, head = transformer(4), nn.Embedding(50, 32, padding_idx=0), nn.Linear(32, 3)
    lengths = torch.randint(4, 24, (16, 1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        empty = x == 0
        hidden = body(words(x), src_key_padding_mask=empty).masked_fill(empty.unsqueeze(-1), 0)
        return F.cross_entropy(head(hidden.sum(1) / (~empty).sum(1, keepdim=True)), y)

    return (nn.ModuleList([body, words, head]), loss,
            (torch.where(torch.arange(24) < lengths, torch.randint(1, 50, (16, 24)), 0), torch.randint(3, (16,))))


def frozen() -> Made:
    """A backbone that is not trained, and a head that is."""
    body, head = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), Residual(16, 32), Residual(32, 32)), nn.Sequential(
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
    body.requires_grad_(False)
    return (nn.ModuleList([body, head]), lambda x, y: F.cross_entropy(head(body(x)), y),
            (torch.randn(16, 3, 32, 32), torch.randint(5, (16,))))


class Adapted(nn.Module):
    def __init__(self, there: nn.Linear) -> None:
        super().__init__()
        self.there, self.down = there, nn.Linear(there.in_features, 4, bias=False)
        self.up = nn.Linear(4, there.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.there(x) + self.up(F.dropout(self.down(x), 0.1, self.training))


def lora() -> Made:
    layers = [nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(5)]
    for layer in layers:
        layer.requires_grad_(False)
        layer[1], layer[3] = Adapted(layer[1]), Adapted(layer[3])
    model, head = nn.Sequential(*layers), nn.Linear(48, 6)
    return (nn.ModuleList([model, head]), lambda x, y: F.cross_entropy(head(model(x)), y),
            (torch.randn(256, 48), torch.randint(6, (256,))))


def mixer() -> Made:
    """Normalization by batch, depthwise convolutions, squeeze and excitation, dropout of whole channels."""
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.Hardswish(),
                             nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.Dropout2d(0.1))

    stem, blocks, head = nn.Conv2d(3, 24, 4, 4), nn.ModuleList(block(24) for _ in range(5)), nn.Linear(24, 5)
    gates = nn.ModuleList(nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 24), nn.Sigmoid()) for _ in range(5))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = stem(x)
        for each, gate in zip(blocks, gates):
            hidden = each(x)
            x = x + hidden * gate(hidden.mean((2, 3)))[:, :, None, None]
        return F.cross_entropy(head(x.mean((2, 3))), y)

    return nn.ModuleList([stem, blocks, head, gates]), loss, (torch.randn(16, 3, 32, 32), torch.randint(5, (16,)))


def dense() -> Made:
    """Every layer reads all before it (DenseNet)."""
    layers = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8 + 6 * i), nn.ReLU(), nn.Conv2d(8 + 6 * i, 6, 3, padding=1))
                           for i in range(8))
    first, head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(56, 5)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        kept = [first(x)]
        for layer in layers:
            kept.append(layer(torch.cat(kept, 1)))
        return F.cross_entropy(head(torch.cat(kept, 1).mean((2, 3))), y)

    return nn.ModuleList([layers, first, head]), loss, (torch.randn(16, 3, 32, 32), torch.randint(5, (16,)))


def graph() -> Made:
    """Messages along the edges of a graph, added up where they arrive."""
    layers = nn.ModuleList(nn.Linear(64, 32) for _ in range(5))
    head, norms = nn.Linear(32, 4), nn.ModuleList(nn.LayerNorm(32) for _ in range(5))

    def loss(x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(layers, norms):
            sent = F.relu(layer(torch.cat([x[edges[0]], x[edges[1]]], 1)))
            x = norm(x + torch.zeros_like(x).index_add(0, edges[1], sent))
        return F.cross_entropy(head(x), y)

    return (nn.ModuleList([layers, head, norms]), loss,
            (torch.randn(200, 32), torch.randint(200, (2, 800)), torch.randint(4, (200,))))


def point_cloud() -> Made:
    """PointNet: each point by itself, the largest over all of them, and distances among them."""
    each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU())
    head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        near = torch.cdist(x.transpose(1, 2), x.transpose(1, 2)).topk(8, largest=False).indices
        hidden = each(x)
        around = hidden.unsqueeze(2).expand(-1, -1, x.shape[2], -1).gather(3, near.unsqueeze(1).expand(-1, 64, -1, -1))
        return F.cross_entropy(head((hidden + around.amax(3)).amax(2)), y)

    return nn.ModuleList([each, head]), loss, (torch.randn(8, 3, 48), torch.randint(5, (8,)))


def tasks(count: int = 2) -> Made:
    """A transformer with a head for each of several tasks, whose losses go back one after the other."""
    layer = nn.TransformerEncoderLayer(48, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True)
    body, heads = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.ModuleList(nn.Linear(48, 5) for _ in range(count))

    def losses(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = body(x).mean(1)
        return tuple(F.cross_entropy(head(hidden), (y + i) % 5) for i, head in enumerate(heads))

    return nn.ModuleList([body, heads]), losses, (torch.randn(16, 32, 48), torch.randint(5, (16,)))


def plain(depth: int = 8) -> Made:
    model = nn.Sequential(*[m for i in range(depth) for m in (nn.Linear(48 + i, 49 + i), nn.Tanh(), nn.Dropout(0.1))],
                          nn.Linear(48 + depth, 4))
    return model, lambda x, y: F.cross_entropy(model(x), y), (torch.randn(512, 48), torch.randint(4, (512,)))


def kept_rows(logits: Tensor, targets: Tensor) -> Tensor:
    keep = targets != -100
    return F.cross_entropy(logits[keep], targets[keep])


def ignored_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def micro_batches(make: Callable[[], Made], n: int) -> Made:
    """Gradients of `n` parts of the batch, added up."""
    model, loss_of, batch = make()
    model.parts = n
    return model, loss_of, batch


NETS: dict[str, Callable[[], Made]] = {
    "layers of many widths": plain,
    "U-Net": unet, "diffusion U-Net with attention": diffusion,
    "LSTM, 2 layers": lambda: recurrent(nn.LSTM, 2), "GRU, both directions": lambda: recurrent(nn.GRU, 1, True),
    "GRU cell in a loop": by_hand,
    "experts on all tokens": lambda: experts(Experts), "experts on their own tokens": lambda: experts(Routed),
    "nn.Transformer": translation, "two towers": towers, "VAE": vae, "padding masks": padded,
    "loss of kept rows": lambda: autoregressive(kept_rows), "loss with ignored rows": lambda: autoregressive(ignored_rows),
    "frozen backbone": frozen, "LoRA": lora, "inverted bottlenecks": mixer, "DenseNet": dense, "graph network": graph,
    "PointNet": point_cloud, "two backwards": tasks, "four backwards": lambda: tasks(4),
    "U-Net, 2 micro-batches": lambda: micro_batches(unet, 2),
    "experts, 4 micro-batches": lambda: micro_batches(lambda: experts(Experts), 4),
}


def build(name: str) -> Training:
    model, loss_of, batch = NETS[name]()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt, n = torch.optim.AdamW(trained, lr=1e-3), getattr(model, "parts", 1)
    model.train()

    def step(*batch: Tensor) -> Tensor:
        for part in memopt.micro_batches(n, *batch) if n > 1 else [batch]:
            losses = loss_of(*part)
            losses = losses if isinstance(losses, tuple) else (losses,)
            for i, each in enumerate(losses, 1):
                loss = each / n
                loss.backward(retain_graph=i < len(losses))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], [opt], lambda i: batch)
