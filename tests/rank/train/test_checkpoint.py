"""A checkpoint is whole or not there, and what goes on from it is the training that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import flat, net, points, quiet
from ranks import run_ranks

from nbkit.errors import TrainingError


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def again(path: Path) -> Any:
    # Dropout, a schedule and a ragged epoch: everything that has a position.
    return quiet(
        model=lambda: net(dropout=0.5),
        optimizer=adamw,
        lr_schedule=lambda step: 1 / (1 + step),
        batch_size=12,
        save_every=4,
        save_path=path,
    )


def resumed(world: Any, folder: Path) -> list[Any]:
    saved = folder / "every.pt"
    whole = again(saved)
    whole.fit(2)
    whole.lr = 0.05
    whole.fit(6)
    first = again(saved)
    first.fit(2)
    first.lr = 0.05
    first.fit(3)  # writes at step 4, and makes one step more, which is lost
    second = again(folder / "second.pt")
    second.load(saved)
    records = second.fit(4)

    def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in record.items() if key != "seconds"} for record in history]

    return [
        plain(whole.history) == plain(second.history),
        torch.equal(flat(whole.model), flat(second.model)),
        [r["step"] for r in records],
        second.lr,
    ]


def test_a_resumed_training_is_bit_for_bit_the_one_that_went_on(tmp_path: Path) -> None:
    for found in run_ranks(resumed, 2, tmp_path):
        assert found[:3] == [True, True, [5, 6, 7, 8]]
        # Set when the factor of the second step, 1/2, stood.
        assert found[3] == pytest.approx(0.05 * 2 / 8)


def wider() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Tanh(), torch.nn.Dropout(0), torch.nn.Linear(17, 3))


def in_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)


def load_and_compare(path: Path, **changed: Any) -> None:
    """What refuses a checkpoint has taken nothing of it."""
    trainer = quiet(**changed)
    before = flat(trainer.model)
    try:
        trainer.load(path)
    finally:
        assert torch.equal(before, flat(trainer.model)) and trainer.step == 0
        trainer.fit(1)


def refused(world: Any, folder: Path) -> list[str]:
    trainer = quiet()
    trainer.fit(1)
    trainer.save(folder / "good.pt")
    late = quiet()
    late.fit(3)
    late.save(folder / "late.pt")
    before = (folder / "good.pt").read_bytes()
    messages = []
    # A model that rank 0 cannot write: the file of before must survive.
    trainer.job.ledger.records.append({"step": lambda: None})
    for act in (
        lambda: trainer.save(folder / "good.pt"),
        lambda: quiet().load(folder / "missing.pt"),
        lambda: quiet(model=lambda: torch.nn.Linear(6, 3)).load(folder / "good.pt"),
        lambda: load_and_compare(folder / "good.pt", model=wider),
        lambda: load_and_compare(folder / "good.pt", optimizer=in_groups),
        lambda: load_and_compare(folder / "late.pt", data=points(16)),
    ):
        with pytest.raises(TrainingError) as raised:
            act()
        messages.append(str(raised.value))
    return [*messages, str((folder / "good.pt").read_bytes() == before), str(sorted(p.name for p in folder.iterdir()))]


def test_what_cannot_be_written_or_read_is_said_on_every_rank_and_the_old_file_stands(tmp_path: Path) -> None:
    found = run_ranks(refused, 2, tmp_path)

    assert found[0] == found[1]
    assert "could not be written" in found[0][0] and "rank 0" in found[0][0]
    assert "could not be read" in found[0][1] and "missing.pt" in found[0][1]
    assert "of another model" in found[0][2] and "0.weight" in found[0][2]
    assert "0.weight is (16, 6) there, (17, 6) here" in found[0][3]
    assert "other parameter groups" in found[0][4] and "[4] there, [2, 2] here" in found[0][4]
    assert "shorter than where training stood" in found[0][5] and "position 24 of epoch 0, 16" in found[0][5]
    assert found[0][6:] == ["True", "['good.pt', 'late.pt']"]


def gathered(world: Any) -> dict[str, torch.Tensor]:
    trainer = quiet()
    trainer.fit(2)
    return trainer.full_state_dict()


def test_the_full_state_dict_is_the_same_on_every_rank() -> None:
    first, second = run_ranks(gathered, 2)

    assert list(first) == list(net().state_dict())
    assert all(torch.equal(first[name], second[name]) for name in first)
