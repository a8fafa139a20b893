"""Real text without a download: the source of Python's standard library, byte by byte, with a baseline to beat.

Every machine with Python has this text, roughly 11 MB of real code. A token is a byte. So a division by ln 2 turns a
loss in nats per token into bits per byte, which can be compared between models with any tokenisation.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nbkit.errors import TrainingError
from nbkit.quoting import user_path

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@lru_cache(maxsize=2)
def stdlib_source(limit: int = 16_000_000) -> bytes:
    """Return the standard library's `*.py` files, sorted, joined and cut at `limit` bytes.

    Tests and installed packages are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in _sources(root):
        if size >= limit:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    return b"".join(parts)[:limit]


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the source files in `folder`, sorted.

    Excluded folders are not walked: with installed packages, that took half a second in each rank.
    """
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of text. Item i is (x, y), both int64 of shape (block,). y is x shifted by one byte.

    path: a text file; None (the default): the source code of Python's standard library. block: the length of an item.
    split: "train" or "heldout". Every tenth section of 64 blocks belongs to "heldout". So both splits have every kind
    of text, and share no byte. limit: the maximum number of bytes to use. Raises TrainingError if the text is too short
    for one block.
    """

    def __init__(self, path: str | None = None, *, block: int = 128, split: str = "train", limit: int = 16_000_000):
        if split not in ("train", "heldout"):
            raise TrainingError(f"There is no split {split!r}.", numbers="splits: train, heldout", hint="split='train'")
        text = stdlib_source(limit) if path is None else user_path(path).read_bytes()[:limit]
        self.path, self.block, self.split = path, block, split
        self.bytes = _split(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0), block)[
            split == "heldout"
        ]
        if len(self) < 1:
            raise TrainingError(
                f"The {split} text is shorter than one block.",
                numbers=f"{len(self.bytes)} bytes of {len(text)}, block {block} + 1",
                hint="a smaller block=, or a longer file",
            )

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.bytes[index * self.block : (index + 1) * self.block + 1].long()
        return window[:-1], window[1:]


def _split(text: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (train, heldout). In a text of fewer than ten sections, the last tenth is held out."""
    stretch = min(64 * block, max(len(text) // 10, 1))
    held = (torch.arange(len(text)) // stretch) % 10 == 9
    return text[~held].to(torch.uint8), text[held].to(torch.uint8)


def bits_per_byte(loss: float) -> float:
    """Convert a mean loss in nats per byte to bits per byte."""
    return loss / math.log(2)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, for logits (B, T, V) and ids (B, T)."""
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def bigram_bits_per_byte(train: TextDataset, heldout: TextDataset) -> float:
    """Return the bits per byte on `heldout` of a bigram model with add-one counts of `train`, as a baseline."""
    counts = torch.ones(256 * 256, dtype=torch.float64)
    counts += torch.bincount(_pairs(train.bytes), minlength=256 * 256)
    log2 = torch.log2(counts.view(256, 256) / counts.view(256, 256).sum(1, keepdim=True)).flatten()
    return float(-log2[_pairs(heldout.bytes)].mean())


def _pairs(text: Tensor) -> Tensor:
    return text[:-1].long() * 256 + text[1:].long()
