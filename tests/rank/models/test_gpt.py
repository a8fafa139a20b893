"""Test that the GPT is causal, repeatable and learns."""

from __future__ import annotations

import pytest
import torch

from nbkit.errors import UsageError
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.models.text import token_loss

torch.set_num_threads(1)  # on a busy machine, threads make such small products slower
SMALL = GPTConfig(block=16, layers=2, heads=2, width=32)


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    ids = torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256

    before, after = model(ids), model(changed)

    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_generation_is_repeatable_beyond_a_block_and_keeps_the_training_mode() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)

    first = model.generate("def ", 30, seed=1)

    assert first == model.generate(b"def ", 30, seed=1) == model.generate(torch.tensor(list(b"def ")), 30, seed=1)
    assert first[:4] == b"def " and len(first) == 34
    assert first != model.generate("def ", 30, seed=2)
    assert model.generate("x", 3, temperature=0) == model.generate("x", 3, temperature=0, seed=9)
    assert model.training


def test_the_gpt_learns_a_line_by_heart() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    line = torch.tensor(list(b"import torch, nbk"))[None]
    for _ in range(40):
        optimizer.zero_grad()
        token_loss(model(line[:, :-1]), line[:, 1:]).backward()
        optimizer.step()

    assert model.generate("import", 10, temperature=0) == b"import torch, nb"


def test_sizes_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match="width 30 / heads 4"):
        GPTConfig(width=30, heads=4)
    with pytest.raises(UsageError):
        GPTConfig(layers=0)
