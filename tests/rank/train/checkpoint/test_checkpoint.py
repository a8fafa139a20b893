"""Test that a checkpoint is complete or missing, and a training resumed from it equals the saved one."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import flat, net, points, quiet
from ranks import RankFailed, run_ranks

import nbkit
from nbkit.errors import TrainingError


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def again(path: Path) -> Any:
    # Dropout, a schedule and a ragged epoch all have a position.
    return quiet(
        model=lambda: net(dropout=0.5),
        optimizer=adamw,
        lr_schedule=lambda step: 1 / (1 + step),
        batch_size=12,
        checkpoints=nbkit.Checkpoints(every=4, path=path),
    )


def resumed(world: Any, folder: Path) -> list[Any]:
    saved = folder / "every"
    whole = again(saved)
    whole.fit(2)
    whole.lr = 0.05
    whole.fit(6)
    first = again(saved)
    first.fit(2)
    first.lr = 0.05
    first.fit(3)  # saves at step 4, and makes one more step, which is lost
    second = again(folder / "second")
    second.load(saved)
    records = second.fit(4)

    def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in record.items() if key != "seconds"} for record in history]

    return [
        plain(whole.history) == plain(second.history),
        torch.equal(flat(whole.model), flat(second.model)),
        [r["step"] for r in records],
        second.lr,
        # After three saves, one file of each rank is left, and the metadata that names them.
        sorted(p.name.partition("_")[2] or p.name for p in saved.iterdir()),
    ]


def test_a_resumed_training_is_bit_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    for found in run_ranks(resumed, 2, tmp_path, timeout=120):
        assert found[:3] == [True, True, [5, 6, 7, 8]]
        # The rate was set while the factor of the second step, 1/2, was in force.
        assert found[3] == pytest.approx(0.05 * 2 / 8)
        assert found[4] == [".metadata", "0_0.distcp", "1_0.distcp"]


def on_a_full_disk(world: Any, folder: Path) -> list[Any]:
    trainer = quiet(checkpoints=nbkit.Checkpoints(every=2, path=folder / "kept"))
    printed = io.StringIO()
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.redirect_stdout(printed):
        trainer.fit(3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a larger write fails, as on a full disk
        try:
            trainer.fit(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        before = quiet()
        before.load(folder / "kept")
        trainer.fit(2)
    return [trainer.step, before.step, printed.getvalue()]


def test_a_failed_save_does_not_end_the_training_or_lose_the_old_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_full_disk, 2, tmp_path, timeout=120)
    step, before, said = first

    assert (step, before) == (7, 2) and second == [7, 2, ""]
    assert said.startswith("\rnot saved at step 4, training continues: The checkpoint ")
    assert "could not be written. rank 0: " in said and "MB are free there)" in said and said.count("\n") == 1


def wider() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Tanh(), torch.nn.Dropout(0), torch.nn.Linear(17, 3))


def in_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)


def load_and_compare(path: Path, **changed: Any) -> None:
    """Load a checkpoint that is refused, and assert that the trainer is unchanged."""
    trainer = quiet(**changed)
    before = flat(trainer.model)
    try:
        trainer.load(path)
    finally:
        assert torch.equal(before, flat(trainer.model)) and trainer.step == 0
        trainer.fit(1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def refused(world: Any, folder: Path) -> list[str]:
    trainer = quiet()
    trainer.fit(1)
    trainer.save(folder / "good")
    late = quiet()
    late.fit(3)
    late.save(folder / "late")
    late.save(folder / "short")
    if world.place.rank == 0:
        cut = next((folder / "short").glob("*_1_0.distcp"))
        cut.write_bytes(cut.read_bytes()[:-10])
        (folder / "harmful").mkdir()
        (folder / "harmful" / ".metadata").write_bytes(pickle.dumps(Harmful()))
        (folder / "a file").write_bytes(b"")
    before = contents(folder / "good")
    messages = []
    # Rank 0 cannot write this history; the previous checkpoint must survive.
    trainer.job.ledger.records.append({"step": lambda: None})
    for act in (
        lambda: trainer.save(folder / "good"),
        lambda: trainer.save(folder / "new"),
        lambda: late.save(folder / "a file"),
        lambda: quiet().load(folder / "missing"),
        lambda: quiet(model=lambda: torch.nn.Linear(6, 3)).load(folder / "good"),
        lambda: load_and_compare(folder / "good", model=wider),
        lambda: load_and_compare(folder / "good", optimizer=in_groups),
        lambda: load_and_compare(folder / "late", data=points(16)),
        lambda: load_and_compare(folder / "short"),
        lambda: load_and_compare(folder / "harmful"),
    ):
        with pytest.raises(TrainingError) as raised:
            act()
        messages.append(str(raised.value))
    assert contents(folder / "good") == before and not Path("harmed").exists()
    assert sorted(p.name for p in folder.iterdir()) == ["a file", "good", "harmful", "late", "short"]
    return messages


def test_write_and_read_errors_are_raised_on_every_rank_without_loss(tmp_path: Path) -> None:
    found = run_ranks(refused, 2, tmp_path, timeout=120)

    assert found[0] == found[1]
    parts = (
        ("could not be written", "rank 0"),
        ("could not be written", "rank 0"),
        ("could not be written", "a file"),
        ("could not be read", "missing"),
        ("of another model", "0.weight"),
        ("0.weight is (16, 6) there, (17, 6) here",),
        ("other parameter groups", "[4] there, [2, 2] here"),
        ("ends before the position", "position 24 of epoch 0, 16"),
        ("could not be read", "_1_0.distcp has", "bytes of"),
        ("could not be read", "the end of its .metadata is missing"),
    )
    for message, expected in zip(found[0], parts, strict=True):
        assert all(part in message for part in expected), (expected, message)


def killed(world: Any, folder: Path, where: str) -> None:
    """Kill a rank in its second save: while it writes, or before the last rename."""
    from nbkit.rank.train.checkpoint import dcp_io

    trainer = quiet(optimizer=adamw)
    trainer.fit(2)
    trainer.save(folder)
    trainer.fit(1)

    def kill(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "writing" and world.place.rank == 1:
        looked_up, calls = dcp_io.Saving.lookup_object, []

        def lookup(planner: Any, index: Any) -> Any:
            calls.append(index)
            return kill() if len(calls) == 3 else looked_up(planner, index)

        dcp_io.Saving.lookup_object = lookup  # type: ignore[method-assign]
    if where == "renaming":
        Path.replace = kill  # type: ignore[method-assign]
    trainer.save(folder)


def after_it(world: Any, folder: Path) -> list[Any]:
    whole = quiet(optimizer=adamw)
    whole.fit(4)
    trainer = quiet(optimizer=adamw)
    trainer.load(folder)
    step = trainer.step
    trainer.fit(2)
    same = torch.equal(flat(whole.model), flat(trainer.model))
    trainer.save(folder)
    return [step, same, len(list(folder.iterdir()))]


@pytest.mark.parametrize("where", ["writing", "renaming"])
def test_the_old_checkpoint_survives_a_rank_killed_in_a_save(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "model"
    with pytest.raises(RankFailed, match=r"died|raised"):
        run_ranks(killed, 2, folder, where, timeout=120)
    assert len(list(folder.iterdir())) > 3

    # The next save deletes the files of the killed one.
    assert run_ranks(after_it, 2, folder, timeout=120) == [[2, True, 3]] * 2


def gathered(world: Any) -> dict[str, torch.Tensor]:
    trainer = quiet()
    trainer.fit(2)
    return trainer.full_state_dict()


def test_the_full_state_dict_is_the_same_on_every_rank() -> None:
    first, second = run_ranks(gathered, 2)

    assert list(first) == list(net().state_dict())
    assert all(torch.equal(first[name], second[name]) for name in first)


def numbers_of_numpy(world: Any, path: Path) -> list[Any]:
    from nbkit.rank.train.checkpoint import dcp_io

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(model[::3], lrs, strict=True)]
        return torch.optim.AdamW(groups, betas=(np.float64(0.8), 0.9), eps=np.float32(1e-6))

    lrs = [np.float64(0.01), torch.tensor([0.02])]
    first = quiet(optimizer=optimizer, seed=np.int64(3), lr_schedule=lambda step: np.float64(1.0))
    first.fit(1)
    first.lr = np.float64(0.03)
    first.save(path)
    settings = dcp_io.DcpReader(path).about["settings"]
    second = quiet(optimizer=optimizer)
    second.load(path)
    same = [r["loss"] for r in first.fit(2)] == [r["loss"] for r in second.fit(2)]
    return [[type(group[key]) for group in settings for key in ("lr", "eps")], type(settings[0]["betas"][0]), same]


def test_numpy_numbers_are_saved_as_plain_numbers(tmp_path: Path) -> None:
    for found in run_ranks(numbers_of_numpy, 2, tmp_path / "kept"):
        assert found == [[float] * 4, float, True]


class Odd(torch.nn.Module):
    """A model with weights and buffers of many types and shapes, some not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.first.weight = torch.nn.Parameter(torch.randn(6, 16).t())
        self.conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.last = torch.nn.Linear(16, 3).to(torch.bfloat16)
        for name, value in {
            "on": torch.tensor([True, False, True]),
            "seen": torch.tensor(7),
            "none": torch.empty(0, 3),
            "turns": torch.randn(5, 4, dtype=torch.complex64).t(),
        }.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x)) * self.scale.float()
        return (self.last(inner.bfloat16()).float() + self.conv.weight.mean()).contiguous()


def saved_and_loaded(world: Any, folder: Path) -> dict[str, torch.Tensor]:
    torch.serialization.set_crc32_options(False)  # as a user who wants faster writes may do
    first = quiet(model=Odd, optimizer=adamw)
    first.fit(2)
    first.save(folder)
    second = quiet(model=Odd, optimizer=adamw, seed=9)
    second.load(folder)
    found = first.full_state_dict()
    again = second.full_state_dict()
    assert all(torch.equal(value, again[name]) for name, value in found.items())
    assert not torch.serialization.get_crc32_options()
    assert [r["loss"] for r in first.fit(2)] == [r["loss"] for r in second.fit(2)]
    return found


def test_weights_of_any_type_and_memory_order_are_saved_unchanged(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (found,) = run_ranks(saved_and_loaded, 1, tmp_path / "kept", timeout=60)
    dcp_to_torch_save(tmp_path / "kept", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")

    for name, value in found.items():
        key = f"buffer/{name}" if name in dict(Odd().named_buffers()) else f"weight/{name}"
        assert value.numel() == 0 or torch.equal(value, plain[key]), name
