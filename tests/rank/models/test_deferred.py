"""Test that a model is built without its large weights, and each rank makes its part bit for bit as the plain build."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from nbkit.rank.comm.thread_group import ThreadMeeting, ThreadRanks
from nbkit.rank.models import deferred
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.models.pretrained import WeightlessModel
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import built_again, skeleton_of
from nbkit.rank.parallel.parallelize import parallelize_lean
from nbkit.rank.parallel.plan import make_plan
from nbkit.rank.parallel.process_groups import connect_threads
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy
from nbkit.trainer_options import ModelHints
from verify.models.specimens import ZOO, cross_entropy, next_tokens

pytestmark = pytest.mark.usefixtures("rows_are_known")

_CPU = torch.device("cpu")
_HELD: list[Any] = []


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=96, block=32, layers=4, heads=4, width=32))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return gpt()


class Various(nn.Module):
    """A model whose weights are drawn, computed, tied, copied, cut and read, as in many libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.parts = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), nn.Embedding(5, 8, padding_idx=1), nn.Linear(8, 6))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7))
        self.own = nn.Parameter(0.02 * torch.randn(4, 5))
        self.drawn = nn.Parameter(torch.rand(4, 5, generator=torch.Generator().manual_seed(5)))
        self.every = [self.own, self.drawn]
        self.register_buffer("mask", torch.ones(6, 6).tril())
        self.angles = torch.arange(12.0).view(3, 4).sin()
        first, last = self.parts[0].weight, self.parts[3].weight  # type: ignore[union-attr]
        nn.init.orthogonal_(first)  # type: ignore[arg-type]
        nn.init.trunc_normal_(last, std=0.02)  # type: ignore[arg-type]
        with torch.no_grad():
            first[:2] *= 0.5  # type: ignore[index]
            last.div_(last.norm())  # type: ignore[operator, union-attr]
            self.parts[3].bias.copy_(torch.arange(6))  # type: ignore[union-attr, operator]
        self.scale = float(first.std())  # type: ignore[operator, union-attr]
        self.half = nn.Linear(6, 6).to(torch.bfloat16)


BUILDERS = {"on meta": on_meta, "various": Various, **{name: specimen.build for name, specimen in ZOO.items()}}


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_LARGE", 1)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_weights_and_buffers_equal_the_plain_build(name: str, all_large: None) -> None:
    build = BUILDERS[name]
    torch.manual_seed(3)
    plain = gpt() if name == "on meta" else build()

    made, why = deferred._record(build, seed=3, device=_CPU)

    assert isinstance(made, WeightlessModel), why
    assert not made.added and not any(p.is_meta for p in made.module.parameters())
    made.make_whole()
    for ours, theirs in zip(made.module.named_parameters(), plain.named_parameters(), strict=True):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]) and ours[1].dtype == theirs[1].dtype, ours[0]
    for ours, theirs in zip(made.module.named_buffers(), plain.named_buffers(), strict=True):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]), ours[0]
    if isinstance(made.module, Various) and isinstance(plain, Various):
        assert torch.equal(made.module.angles, plain.angles)
        assert (made.module.scale, made.module.rates) == (plain.scale, plain.rates)
        assert made.module.every[0] is made.module.own


def escapes() -> nn.Module:
    module = nn.Linear(30, 30)
    _HELD.append(module.weight.data)
    return module


def by_numpy() -> nn.Module:
    module = nn.Linear(30, 30)
    module.weight.data = torch.from_numpy(module.weight.detach().numpy() * 2)
    return module


def changed_later() -> nn.Module:
    given = torch.from_numpy(numpy.ones((300, 300), numpy.float32))
    module = nn.Linear(300, 300)
    with torch.no_grad():
        module.weight.copy_(given)
    given.zero_()
    return module


def test_a_model_that_cannot_be_recorded_is_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_WORTH_SAYING", 1)
    monkeypatch.setattr(deferred, "_LARGE", 1)
    for build, why in ((escapes, "something outside of its modules"), (by_numpy, "numpy")):
        torch.manual_seed(3)
        plain = build()
        with pytest.warns(UserWarning, match=f"builds the whole model.* GB each.*{why}"):
            module, weightless = deferred.build_parts(build, seed=3, device=_CPU, world_size=1)
        assert weightless is None
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True)
        )
    made, _ = deferred._record(changed_later, seed=3, device=_CPU)
    assert isinstance(made, WeightlessModel)
    with pytest.raises(deferred.NotRecorded, match="changes a tensor after"):
        made.make_whole()


def test_small_tensors_are_made_as_usual_and_is_meta_is_restored() -> None:
    module, why = deferred._record(gpt, seed=3, device=_CPU)
    assert isinstance(module, nn.Module) and not why
    assert torch.empty(1, device="meta").is_meta and "is_meta" not in vars(torch.Tensor)


def trainer(strategy: str, model: Any = gpt, optimizer: Any = None) -> Trainer:
    ids, target = next_tokens(16, torch.Generator().manual_seed(4))
    return Trainer(
        model=model,
        loss=cross_entropy,
        optimizer=optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)),
        data=list(zip(ids, target, strict=True)),
        batch_size=8,
        strategy=strategy,
        log_dir=None,
        progress=False,
    )


def by_norm(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * float(p.detach().norm())} for p in model.parameters()])


def started(world: Any, strategies: list[str]) -> list[dict[str, Any]]:
    deferred._LARGE = 1
    torch.manual_seed(0)
    plain, found = gpt().state_dict(), []
    inner, sizes = deferred.Recording._content, list[int]()

    def counted(recording: Any, key: int, before: int, memo: Any) -> torch.UntypedStorage:
        made = inner(recording, key, before, memo)
        sizes.append(made.nbytes())
        return made

    deferred.Recording._content = counted  # type: ignore[method-assign]
    for strategy in strategies:
        sizes.clear()
        made = trainer(strategy)
        state = made.full_state_dict()
        found.append(
            {
                "strategy": strategy,
                "same": all(torch.equal(state[name], value) for name, value in plain.items()),
                "made": sum(sizes),
                "all": sum(value.nbytes for value in plain.values()),
            }
        )
    made.fit(1)
    read = trainer("zero3", optimizer=by_norm)
    found.append({"rates": [group["lr"] for group in read.optimizer.param_groups], "loss": made.history[-1]["loss"]})
    return found


def test_every_strategy_starts_with_the_weights_of_the_plain_build(known_to_be_right: Any) -> None:
    torch.manual_seed(0)
    norms = [0.1 * float(p.detach().norm()) for p in gpt().parameters()]
    for found in run_ranks(started, 2, ["zero3", "tp", "pp microbatches=2"], timeout=240):
        *cases, read = found
        assert all(case["same"] for case in cases), cases
        assert cases[2]["made"] < 0.7 * cases[2]["all"]  # a stage makes no weight of the other stage
        assert read["rates"] == pytest.approx(norms) and read["loss"] > 0


def counted_peak(work: Callable[[], Any], patch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """Return (the result of `work`, the peak bytes of tensors that it made).

    torch's profiler sees each allocation. The patch lets torch allocate the memory that a recording maps itself.
    """
    from torch.profiler import ProfilerActivity, profile

    patch.setattr(deferred, "_memory", lambda size: torch.empty(max(size, 1), dtype=torch.uint8).untyped_storage())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    return result, max(accumulate(sizes))


def model_of(layers: int, width: int, vocab: int) -> nn.Module:
    return GPT(GPTConfig(vocab=vocab, block=256, layers=layers, heads=4, width=width))


def one_block(model: nn.Module) -> int:
    """Return the bytes of a block, or of the largest weight if that is larger."""
    weights = [p.nbytes for p in model.parameters()]
    return max(*weights, sum(p.nbytes for p in model.get_submodule("blocks.0").parameters()))


def kept(sharded_model: ShardedModel) -> int:
    return sum(target.nbytes for target, _ in sharded_model.data.weights.values())


def same_as(sharded_model: ShardedModel, plain: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(target[here.slices], plain[name][there.slices])
        for name, (target, layout) in sharded_model.data.weights.items()
        for here, there in layout.pieces
    )


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "tp", "dp=2 tp=2"])
def test_a_rank_holds_its_part_and_one_block_during_the_build(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(model_of, 4, 256, 600)
    torch.manual_seed(3)
    plain = {name: p.detach() for name, p in small().named_parameters()}
    ranks = ThreadRanks(4)

    def built() -> ShardedModel:
        module, weightless = deferred.build_parts(small, seed=3, device=_CPU, world_size=1)
        assert weightless is not None
        plan = make_plan(Strategy.parse(strategy, 4), ModelFacts(ModelShapes(skeleton_of(module))))
        connections = connect_threads(plan, 1, lambda _, members: ThreadMeeting(ranks, members))
        sharded_model = parallelize_lean(plan, connections, device=_CPU)
        weightless.fill(sharded_model)
        return sharded_model

    sharded_model, peak = counted_peak(built, monkeypatch)
    assert same_as(sharded_model, plain)
    assert peak <= 1.05 * (kept(sharded_model) + one_block(small()))


def test_the_second_model_of_a_comparison_is_built_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(model_of, 4, 256, 600)
    module, _ = deferred.build_parts(small, seed=3, device=_CPU, world_size=1)
    again, peak = counted_peak(
        lambda: built_again(deferred.without_memory(small), skeleton_of(module), first=module), monkeypatch
    )
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert peak < one_block(module)


def measured(world: Any, strategy: str) -> dict[str, Any]:
    device, place = torch.device("cpu"), {"rank": world.place.rank, "world_size": world.place.world_size}
    chosen = Strategy.parse(strategy, place["world_size"])
    large = functools.partial(model_of, 24, 768, 32_000)
    example = next_tokens(4, torch.Generator().manual_seed(4))
    config = TrainConfig(cross_entropy, hints=ModelHints(example=example))

    def built() -> ShardedModel:
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        builder = Builder(large, lambda model: sgd(model.parameters()), config, device=device, asked=[chosen], **place)
        return builder.first(chosen)[0]

    with pytest.MonkeyPatch.context() as patch:
        sharded_model, peak = counted_peak(built, patch)
    with torch.device("meta"):
        shapes = large()
    same = True
    if world.place.rank == 0:
        torch.manual_seed(0)
        same = same_as(sharded_model, {name: p.detach() for name, p in large().named_parameters()})
    dist.barrier()
    bound = kept(sharded_model) + one_block(shapes)
    return {"ratio": peak / bound, "peak": peak, "kept": kept(sharded_model), "same": same}


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("strategy", ["zero3", "tp", "pp microbatches=4"])
def test_a_model_of_200_million_is_built_part_by_part(strategy: str, known_to_be_right: Any) -> None:
    for found in run_ranks(measured, 4, strategy, timeout=900):
        print(strategy, found)
        assert found["same"] and found["ratio"] <= 1.05
