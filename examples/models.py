"""Plain PyTorch models of the examples: nothing in them knows of memopt."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(width, dim=2))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = self.project(seen.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(seen, self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of `x` by angles that grow with the position (rotary embedding)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GPT(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary]; pre-norm blocks.

    Positions are rotations, since a few hundred steps are too few to learn an embedding of them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts small beside the tokens.
                std = 0.3 if name.startswith("tokens") else 0.02
                std /= math.sqrt(2 * config.layers) if "project" in name or "down" in name else 1
                nn.init.normal_(parameter, std=std)
        pairs = torch.arange(0, config.width // config.heads, 2) * config.heads / config.width
        angles = torch.outer(torch.arange(config.context), 1000.0**-pairs).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(self, start: Tensor, length: int) -> Tensor:
        """`start` [1, n] continued by `length` tokens drawn from the model."""
        text = start
        for _ in range(length):
            logits = self(text[:, -self.config.context:])[:, -1]
            text = torch.cat([text, torch.multinomial(F.softmax(logits / 0.8, -1), 1)], 1)
        return text


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential() if inputs == outputs and stride == 1 else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


class ResNet(nn.Sequential):
    """Images [batch, 1, 28, 28] to logits [batch, 10]."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        first = widths[0]
        super().__init__(
            nn.Conv2d(1, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU(),
            Residual(first, first, 1),
            *(Residual(inputs, outputs, 2) for inputs, outputs in itertools.pairwise(widths)),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
