"""Test that the text is real, train and heldout share no byte, and the bigram's figure is right."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nbkit.errors import TrainingError
from nbkit.rank.models.text import TextDataset, bigram_bits_per_byte, bits_per_byte, stdlib_source


def test_the_standard_library_is_megabytes_of_python_without_tests() -> None:
    source = stdlib_source()

    assert len(source) > 5_000_000
    assert b"class Counter(dict):" in source
    assert b"import unittest\n\nfrom test import support" not in source
    assert stdlib_source(1000) == source[:1000]


def test_items_are_blocks_and_their_next_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    data = TextDataset(str(tmp_path / "text"), block=8)

    x, y = data[3]

    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (8,)
    assert x[1:].tolist() == y[:-1].tolist()
    assert x.tolist() == list(range(24, 32)) and y.tolist() == list(range(25, 33))
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.parametrize("size", [300, 10_240])
def test_train_and_heldout_share_no_byte(tmp_path: Path, size: int) -> None:
    (tmp_path / "text").write_bytes(bytes(range(250)) * (size // 250) + b"z" * (size % 250))
    train, heldout = (TextDataset(str(tmp_path / "text"), block=8, split=split) for split in ("train", "heldout"))

    assert len(train.bytes) + len(heldout.bytes) == size
    assert 0.05 < len(heldout.bytes) / size < 0.15


def test_bigram_bits_per_byte_are_right(tmp_path: Path) -> None:
    text = (b"abracadabra" * 100)[:1000]
    (tmp_path / "text").write_bytes(text)
    train, heldout = (TextDataset(str(tmp_path / "text"), block=4, split=split) for split in ("train", "heldout"))

    raw, other = bytes(train.bytes.tolist()), bytes(heldout.bytes.tolist())
    pairs, firsts = Counter(pairwise(raw)), Counter(raw[:-1])
    bits = [-math.log2((pairs[a, b] + 1) / (firsts[a] + 256)) for a, b in pairwise(other)]

    assert bigram_bits_per_byte(train, heldout) == pytest.approx(sum(bits) / len(bits))
    assert bits_per_byte(math.log(256)) == pytest.approx(8)


def test_a_text_that_is_too_short_and_an_unknown_split_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(TrainingError, match="shorter than one block"):
        TextDataset(str(tmp_path / "text"), block=128)
    with pytest.raises(TrainingError, match="test"):
        TextDataset(split="test")
