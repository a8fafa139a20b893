"""Test that during fit, Python collects garbage only between steps, and after the same steps on all ranks."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
from jobs import points, quiet
from ranks import run_ranks


class Cycle:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.me = self


def collected(world: Any) -> list[tuple[int, int]]:
    """Return (finished steps, generation) of each collection in a fit. The first rank makes much garbage."""
    found: list[tuple[int, int]] = []
    alive: list[weakref.ref[Cycle]] = []

    def makes_garbage(trainer: Any, record: dict[str, Any]) -> None:
        assert not gc.isenabled()
        assert not any(one() for one in alive)  # no cycle of an earlier step is left
        alive[:] = [weakref.ref(Cycle()) for _ in range(5000 * (world.place.rank == 0))]

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append((trainer.step, info["generation"]))

    trainer = quiet(callbacks=[makes_garbage])
    trainer.fit(1)
    gc.callbacks.append(noted)
    trainer.fit(until=52)
    gc.callbacks.remove(noted)
    assert gc.isenabled()
    return [one for one in found if one[0] > 1]


def test_ranks_collect_after_the_same_steps() -> None:
    first, second = run_ranks(collected, 2)
    assert first == second == [(step, int(step == 50)) for step in range(2, 53)]


def afterwards(world: Any) -> list[bool]:
    """Return whether automatic collection is on (after a failed fit, after a fit of a user who had disabled it)."""

    def forks(trainer: Any, record: dict[str, Any]) -> None:
        if (child := os.fork()) == 0:
            os._exit(0 if gc.isenabled() else 1)
        if os.waitpid(child, 0)[1] != 0 or gc.isenabled():
            raise RuntimeError("a worker of the data would collect nothing")
        if record["step"] == 2:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        quiet(callbacks=[forks]).fit(3)
    found = [gc.isenabled()]
    gc.disable()
    quiet().fit(2)
    return [*found, gc.isenabled()]


def test_automatic_collection_is_restored_after_a_fit_and_after_an_error() -> None:
    assert run_ranks(afterwards, 1) == [[True, False]]


class Asked(list[Any]):
    """Data that notes whether automatic collection is on when it is read."""

    def __init__(self) -> None:
        super().__init__(points(8))
        self.found: set[bool] = set()

    def __getitem__(self, index: Any) -> Any:
        self.found.add(gc.isenabled())
        return super().__getitem__(index)


def evaluated(world: Any) -> tuple[list[bool], set[bool]]:
    """Return whether automatic collection is on in the callbacks of two steps, and in their evaluations."""
    steps, data = list[bool](), Asked()
    quiet(eval_data=data, eval_every=1, callbacks=[lambda *_: steps.append(gc.isenabled())]).fit(2)
    return steps, data.found


def test_automatic_collection_is_on_in_evaluations_and_off_in_steps() -> None:
    assert run_ranks(evaluated, 1) == [([False, False], {True})]
