"""Test that a switch is prepared during the training, and uses only preparations that are still valid."""

from __future__ import annotations

import pickle
import random
import threading
import time
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import asked_for, flat, one_process, points, quiet
from ranks import run_ranks

from nbkit.bridge.training_requests import TrainingRequestHandler
from nbkit.planner.exchange import ExchangePlan
from nbkit.rank.comm.agree import USUAL_BYTES, all_gather_objects
from nbkit.rank.parallel import parallelize
from nbkit.rank.parallel.reshard.redistribute import Exchange
from nbkit.rank.train import transaction
from nbkit.rank.train.estimate import free_memory
from nbkit.rank.train.estimate.free_memory import side_bytes
from nbkit.rank.train.switch import consensus as joining
from nbkit.rank.train.switch import prefetch
from nbkit.rank.train.switch import switch as switching
from nbkit.rank.train.switch.exchange_cache import ExchangeCache
from tests.rank.parallel.reshard.test_redistribute import Wire

pytestmark = pytest.mark.usefixtures("known_to_be_right")


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 3))


def planned_in(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that receives ("plan" or "cut", name of the thread) for each plan and cut from now on."""
    found: list[tuple[str, str]] = []
    spread, cut = ExchangePlan.of.__func__, parallelize.cut

    def of(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(("plan", threading.current_thread().name))
        return spread(cls, *args, **kwargs)

    def cutting(*args: Any, **kwargs: Any) -> Any:
        found.append(("cut", threading.current_thread().name))
        return cut(*args, **kwargs)

    from nbkit.rank.train import builder

    patch.setattr(ExchangePlan, "of", classmethod(of))
    patch.setattr(builder, "cut", cutting)
    patch.setattr(parallelize, "cut", cutting)
    return found


def while_it_trains(world: Any) -> dict[str, Any]:
    trainer = quiet(optimizer=adam, data=points(40))
    controls = TrainingRequestHandler()
    trainer.fit(1)
    for strategy in ("zero3", "zero1"):  # their groups exist
        trainer.switch(strategy)
    with pytest.MonkeyPatch.context() as patch:
        made = planned_in(patch)
        result = asked_for(trainer, controls, "zero3", after=0.2 * world.place.rank)
    trainer.fit(1)
    return {"told": result, "made": made, "losses": [record["loss"] for record in trainer.history]}


def test_a_switch_during_training_pauses_only_to_move_the_state() -> None:
    found = run_ranks(while_it_trains, 2, timeout=200)
    steps = len(found[0]["losses"])
    losses, _, _ = one_process(points(40), steps=steps, optimizer=adam)
    for rank in found:
        assert rank["told"]["ok"] and rank["told"]["strategy"] == "dp=2 zero=3"
        assert rank["told"]["step"] == found[0]["told"]["step"]
        assert rank["told"]["result"]["identical"] and rank["told"]["result"]["beside_s"] > 0
        assert sorted(rank["made"]) == [("cut", "nbkit-ahead"), ("plan", "nbkit-ahead")]
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)


def late_or_broken(world: Any) -> list[Any]:
    trainer = quiet(optimizer=adam, data=points(40))
    controls, go_on, made = TrainingRequestHandler(), threading.Event(), prefetch.make_ready
    trainer.fit(1)

    def slowly(job: Any, text: str) -> None:
        go_on.wait(60)
        made(job, text)

    def broken(job: Any, text: str) -> None:
        raise RuntimeError("planted")

    def meanwhile(step: int) -> None:
        if step == 30:
            go_on.set()

    results = []
    with pytest.MonkeyPatch.context() as patch:
        for strategy, making in (("zero1", slowly), ("zero3", broken)):
            if world.place.rank == 1:
                patch.setattr(prefetch, "make_ready", making)
            results.append(asked_for(trainer, controls, strategy, meanwhile=meanwhile))
    # At the boundary, all ranks refuse a split that is not possible, and the training goes on.
    results.append(asked_for(trainer, controls, "tp=3"))
    return results


def test_a_switch_waits_for_a_late_rank_but_not_for_one_that_cannot_prepare() -> None:
    found = run_ranks(late_or_broken, 2, timeout=200)
    for late, broken, refused in found:
        assert late["ok"] and late["step"] == found[0][0]["step"] > 30
        assert broken["ok"] and broken["result"]["identical"]
        assert not refused["ok"] and refused["error"] == "StrategyError" and refused["strategy"] == "dp=2 zero=3"


def first_visits(world: Any) -> dict[str, Any]:
    trainer, controls = quiet(optimizer=adam, data=points(40)), TrainingRequestHandler()
    trainer.fit(1)
    found: dict[str, Any] = {"results": [], "made": []}
    made: set[tuple[str, str]] = set()
    new_group, fails = torch.distributed.new_group, False

    def noting(ranks: list[int], **kwargs: Any) -> Any:
        thread = threading.current_thread().name
        made.add((kwargs["group_desc"], thread))
        if fails and thread == "nbkit-groups":
            raise RuntimeError("planted")
        return new_group(ranks, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", noting)
        patch.setattr(prefetch, "GROUPS_SECONDS", 1.0)
        planned = planned_in(patch)
        for strategy in ("hsdp", "zero=1 shard=2", "dp=2 tp=2"):
            fails = strategy == "dp=2 tp=2" and world.place.rank == 1
            found["results"].append(asked_for(trainer, controls, strategy))
            found["made"].append(made.copy())
            made.clear()
    found["cut"] = [thread for what, thread in planned if what == "cut"]
    found["losses"] = [record["loss"] for record in trainer.history]
    return found


@pytest.mark.long
def test_groups_are_made_during_training_or_by_the_switch() -> None:
    every = run_ranks(first_visits, 4, timeout=200)
    losses, _, _ = one_process(points(40), steps=len(every[0]["losses"]), optimizer=adam)
    for found in every:
        assert all(result["ok"] and result["result"]["identical"] for result in found["results"])
        hsdp, shared, failed = found["made"]
        assert hsdp == {("shard", "nbkit-groups"), ("replicate", "nbkit-groups")} and not shared
        assert {("dp", "MainThread"), ("tp", "MainThread")} <= failed
        assert found["cut"] == ["nbkit-groups", "nbkit-ahead", "MainThread"]
        assert found["losses"] == pytest.approx(losses, rel=1e-5)


def groups_of_ones_own(world: Any) -> list[float]:
    trainer, controls = quiet(optimizer=adam, data=points(40)), TrainingRequestHandler()
    trainer.fit(1)
    new_group, sums = torch.distributed.new_group, []

    def slowly(ranks: list[int], **kwargs: Any) -> Any:
        if threading.current_thread().name == "nbkit-groups" and world.place.rank == 1:
            time.sleep(0.2)
        return new_group(ranks, **kwargs)

    def meanwhile(step: int) -> None:
        if any(thread.name == "nbkit-groups" for thread in threading.enumerate()) and not sums:
            own = new_group([0, 1])
            number = torch.tensor(1.0 + world.place.rank)
            torch.distributed.all_reduce(number, group=own)
            sums.append(float(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", slowly)
        result = asked_for(trainer, controls, "tp", meanwhile=meanwhile)
    trainer.fit(2)
    return [*sums, float(result["ok"])]


def test_a_users_group_made_meanwhile_comes_after_nbkits_on_every_rank() -> None:
    assert run_ranks(groups_of_ones_own, 2, timeout=100) == [[3.0, 1.0]] * 2


def out_of_date(world: Any) -> dict[str, Any]:
    trainer = quiet(optimizer=adam, data=points(40))
    trainer.fit(2)
    for strategy in ("zero3", "ddp"):
        trainer.switch(strategy)
    drawn = torch.get_rng_state()
    prefetch.make_ready(trainer.job, "zero3")
    found: dict[str, Any] = {"drew": not torch.equal(drawn, torch.get_rng_state())}
    name, frozen = next(iter(trainer.model.named_parameters()))
    if world.place.rank == 1:
        frozen.requires_grad_(False)  # on one rank; all follow
    found["first"] = trainer.switch("zero3").identical
    found["trains"] = dict(trainer.model.named_parameters())[name].requires_grad
    # One rank does not hold what its strategy says.
    holdings, said = ExchangeCache.layouts_by_rank, []

    def without_one(self: ExchangeCache, *args: Any) -> Any:
        whole = holdings(self, *args)
        for rank in whole if world.place.rank == 1 else ():
            rank.pop(f"weight/{name}")
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExchangeCache, "layouts_by_rank", without_one)
        patch.setattr(joining, "plan_collectively", _noted(said, joining.plan_collectively))
        found["told"] = trainer.switch("zero1").identical
    found["said"] = len(said)
    trainer.switch("zero3")
    found["weights"] = trainer.full_state_dict()
    return found


def _noted(said: list[int], fn: Any) -> Any:
    def noting(*args: Any) -> Any:
        said.append(1)
        return fn(*args)

    return noting


def test_outdated_preparations_are_remade_and_differing_ranks_plan_together() -> None:
    _, _, model = one_process(points(40), steps=2, optimizer=adam)
    for found in run_ranks(out_of_date, 2, timeout=200):
        assert not found["drew"]
        assert found["first"] and not found["trains"]
        assert found["told"] and found["said"] == 1
        whole = torch.cat([found["weights"][name].flatten() for name, _ in model.named_parameters()])
        torch.testing.assert_close(whole, flat(model), rtol=1e-4, atol=1e-6)


def in_few_bytes(world: Any) -> list[tuple[int, bool]]:
    from tests.rank.train.switch.test_switch import trainer as of_many_blocks

    trainer, found = of_many_blocks(), []
    trainer.fit(1)
    tell, together = transaction.all_gather_objects, joining.plan_collectively
    with pytest.MonkeyPatch.context() as patch:
        more: list[int] = []
        patch.setattr(joining, "plan_collectively", _noted(more, together))
        sizes: list[int] = []

        def measured(own: Any, **kwargs: Any) -> Any:
            sizes.append(len(zlib.compress(pickle.dumps(own), level=1)))
            return tell(own, **kwargs)

        patch.setattr(transaction, "all_gather_objects", measured)
        for strategy in ("dp=2 pp=2", "zero3", "cp=2 tp=2"):
            sizes.clear()
            trainer.switch(strategy)
            found.append((sum(sizes), bool(more)))
            trainer.fit(1)
    return found


@pytest.mark.long
@pytest.mark.usefixtures("rows_are_known")
def test_ranks_exchange_a_few_hundred_bytes_to_plan_a_switch() -> None:
    for rank in run_ranks(in_few_bytes, 4, timeout=300):
        assert all(size < 600 and not more for size, more in rank), rank


ROUND = 4096


def in_rounds(world: Any) -> list[tuple[int, bool, dict[str, torch.Tensor]]]:
    """Return for each switch (number of messages, whether the state was identical, weights after it)."""
    trainer, found = quiet(model=wide, optimizer=adam, data=points(40), strategy="zero3"), []
    trainer.fit(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(free_memory, "ROUND_BYTES", ROUND)
        patch.setattr(free_memory, "MOST_ROUND_BYTES", 32 * ROUND)
        patch.setattr(switching, "ROUND_BYTES", ROUND)
        patch.setattr(free_memory, "accelerator", lambda: SimpleNamespace(holds=lambda device: True))
        for spares in SPARES:
            spare = spares[world.place.rank]
            new = side_bytes(
                trainer.job.builder, trainer.job.bytes_per_element(), trainer.job.parsed("ddp"), world.place.rank
            )
            for module in (free_memory, joining):
                patch.setattr(module, "left", lambda *_, free=new + spare: free)
            if spares == IN_PIECES and world.place.rank == 1:
                patch.setattr(Exchange, "make_room", without_large_pieces(Exchange.make_room))
            with Wire() as wire:
                identical = trainer.switch("ddp").identical
            messages = [moved for operation, moved in wire if operation == "all_to_all"]
            found.append((len(messages), bool(identical), trainer.full_state_dict()))
            trainer.switch("zero3")
    return found


def without_large_pieces(make_room: Any) -> Any:
    def refusing(self: Exchange, *args: Any, **kwargs: Any) -> None:
        if self.limit == 32 * ROUND:
            raise torch.OutOfMemoryError("planted: all free pieces are smaller")
        make_room(self, *args, **kwargs)

    return refusing


IN_PIECES = (1 << 41, 1 << 41)
SPARES = (
    (8 * ROUND, 8 * ROUND),
    (16 * ROUND, 1 << 40),
    (1 << 40, 32 * ROUND),
    (1 << 40, 1 << 40),
    (2 * ROUND, 1 << 40),
    IN_PIECES,
)
"""Memory of each of two ranks besides the new model."""


def test_rounds_are_as_large_as_the_rank_with_the_least_free_memory_allows() -> None:
    """Compute the rounds: weights and moments take 12 bytes for each parameter, and a rank lacks half of them."""
    lacks = 6 * sum(p.numel() for p in wide().parameters())
    for found in run_ranks(in_rounds, 2, timeout=120):
        *found, in_pieces = found
        for (count, identical, weights), size in zip(found, (1, 2, 4, 32, 1), strict=True):
            # Rounds are not completely full, because tensors are cut into pieces.
            assert lacks / (size * ROUND) <= count <= 1.3 * lacks / (size * ROUND) + 1, size
            assert identical
            assert all(torch.equal(weights[name], value) for name, value in found[0][2].items())
        # Here all ranks use the default rounds of 24 MB, which no constant of this test changes.
        assert in_pieces[:2] == (1, True)
        assert all(torch.equal(in_pieces[2][name], value) for name, value in found[0][2].items())


def told_at_length(world: Any) -> list[Any]:
    rank = world.place.rank
    own = (rank, random.Random(rank).randbytes(40 if rank else 3 * USUAL_BYTES))
    return [all_gather_objects(each, world_size=3, device=torch.device("cpu")) for each in (own, rank)]


def test_a_long_message_of_one_rank_arrives_complete() -> None:
    parcels = [(rank, random.Random(rank).randbytes(40 if rank else 3 * USUAL_BYTES)) for rank in range(3)]
    assert run_ranks(told_at_length, 3) == [[parcels, [0, 1, 2]]] * 3
