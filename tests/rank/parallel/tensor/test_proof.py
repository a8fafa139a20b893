"""Test that a split is tried against the whole model first, so training equals one process for every forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import StrategyError
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.proof.prove import prove
from nbkit.rank.train.checkpoint.job_state import weights
from nbkit.rank.train.job import prepare
from nbkit.rank.train.trainer import Trainer
from verify.models import between
from verify.models.between import INNER, MODELS, Block, Model, gelu
from verify.models.specimens import LENGTH, VOCAB, WIDTH, ZOO, cross_entropy, hf_llama
from verify.tensor_split import compared, proven

IDS = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))
BATCH = (IDS, IDS.roll(-1, 1))
STEPS = 2


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:  # no bias is zero, so that a missing bias shows
                p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.1)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def trained(world: Any, names: Sequence[str]) -> dict[str, tuple[float, float, int, tuple[str, ...]]]:
    """Return {name: (largest difference of a weight, of a loss, number of split pairs, notes)}."""
    found = {}
    for name in names:
        model, alone = built(name), built(name)
        optimizer, losses = sgd(alone), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = cross_entropy(alone(IDS), BATCH[1])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        job = prepare(
            model, sgd, loss=cross_entropy, strategy="tp", hints=nbkit.ModelHints(example=BATCH), log_dir=None
        )
        for batch in job.batches([BATCH] * STEPS):
            job.backward(batch)
            job.optimizer.step()
            job.optimizer.zero_grad()
        truth, off = dict(alone.named_parameters()), 0.0
        for key, (tensor, layout) in weights(job.sharded_model).items():
            whole = truth.get(key.removeprefix("weight/"))
            for here, there in layout.pieces if whole is not None else ():
                off = max(off, float((tensor[here.slices] - whole.detach()[there.slices]).abs().max()))  # type: ignore
        apart = max(abs(a - record["loss"]) for a, record in zip(losses, job.history, strict=True))
        pairs = job.builder.facts.tensor_plan(2, None).pairs
        found[name] = (off, apart, len(pairs), tuple(job.sharded_model.notes))
    return found


# In a job, the other proofs and the whole step check a model too. Here is one model for each kind of operation between
# the maps, and for ties, split and whole.
IN_A_JOB = (
    "softmax, deep", "one MLP twice", "three places",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_models_trains_in_a_job_as_in_one_process() -> None:
    for answer in run_ranks(trained, 2, IN_A_JOB, timeout=170):
        for name, (off, apart, pairs, _) in answer.items():
            assert off < 1e-9 and apart < 1e-9, (name, off, apart)
            assert pairs == MODELS[name][1], name


def split(world: Any, names: list[str]) -> dict[str, tuple[float, float, int, tuple[str, ...]]]:
    """Return {name: (largest difference of a gradient, of the loss, number of split pairs, notes)}."""
    found = {}
    for name in names:
        plan = proven(built(name), IDS)
        loss = partial(cross_entropy, target=BATCH[1])
        off, apart, made, _ = compared(world, built(name), IDS, loss, plan=plan)
        found[name] = (off, apart, len(plan.pairs), made.notes)
    return found


# One model for each of: sums, norms, orders and counts of features, learned values, heads, memories, ties, positions.
SAMPLE = [
    "softmax, deep", "centring in place", "topk", "count", "four groups", "a learned slope", "batch norm",
    "beside its output, used", "one MLP twice", "norm of all", "talking heads", "a memory", "three places",
    "cumsum of positions", "a learned mask",
]  # fmt: skip
REST = [name for name in MODELS if name not in SAMPLE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [SAMPLE, pytest.param(REST, marks=pytest.mark.long)])
def test_gradients_of_split_and_whole_models_equal_those_of_one_process(names: list[str]) -> None:
    for answer in run_ranks(split, 2, names, timeout=170):
        for name, (off, apart, pairs, notes) in answer.items():
            assert off < 1e-9 and apart < 1e-9, (name, off, apart)
            assert pairs == MODELS[name][1], name
            if "position" in name and name != "positions together":
                assert "positions are not split" in " ".join(notes), name
            if name == "a learned mask":
                assert "parameter far enters an attention" in " ".join(notes)


def verdict_of(model: nn.Module, size: int = 2) -> Any:
    proof = prove(model, lambda: model(IDS[:2]), [size])
    assert proof.why == ""
    return proof.of(size)


def test_a_pair_whose_parts_depend_on_each_other_is_not_split_over_four() -> None:
    for name in ("softmax", "four groups", "cumsum", "max-norm", "heads in order"):
        assert verdict_of(built(name), 4).ways == {}, name
    for name in ("gelu, deep", "a learned slope", "groups of eight", "attention"):
        assert verdict_of(built(name), 4).wrong == {}, name


def test_gradients_of_parameters_between_the_maps_are_summed() -> None:
    assert verdict_of(built("a learned slope")).partial == {"blocks.0.mlp.act.weight", "blocks.1.mlp.act.weight"}
    assert verdict_of(built("one MLP twice")).partial == {"blocks.0.mlp.act.weight"}
    assert verdict_of(built("gelu")).partial == frozenset()


def test_the_proof_does_not_change_the_model() -> None:
    model = built("batch norm")
    model.blocks[1].eval()  # type: ignore[union-attr]
    before, kinds = copy.deepcopy(model.state_dict()), [type(part) for part in model.modules()]
    modes, state = [part.training for part in model.modules()], torch.random.get_rng_state()
    model.tokens.weight.requires_grad_(False)  # type: ignore[union-attr]
    prove(model, lambda: model(IDS), [2])

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [type(part) for part in model.modules()] == kinds
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["tokens.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert not any("_noted" in vars(part) for part in model.modules())


def test_without_an_example_only_known_classes_are_split() -> None:
    unknown = plan_of(built("gelu, deep"), 2)
    assert unknown.pairs == () and unknown.singles == {}
    assert "there was no example batch" in unknown.unproven["blocks.0.mlp"]
    assert "no example batch" in {row[0]: row[2] for row in unknown.describe(built("gelu, deep"))}["blocks.*.mlp.up"]
    for name, pairs in (("gpt", 8), ("gpt2", 8), ("llama", 8), ("qwen2", 8), ("sequential", 2)):
        assert len(plan_of(ZOO[name].build(), 2).pairs) == pairs, name
    assert plan_of(hf_llama(2, hidden_act="prelu"), 2).unproven.keys() == {"model.layers.0.mlp", "model.layers.1.mlp"}


class Softened(nn.GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


def test_a_subclass_of_a_known_class_is_unknown() -> None:
    row = nn.Sequential(nn.Linear(8, 16), Softened(), nn.Linear(16, 8))
    assert plan_of(row, 2).pairs == ()
    assert len(plan_of(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 2).pairs) == 1


SAID = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}


def test_a_plan_of_the_user_is_tried_too() -> None:
    wrong, right = built("softmax"), built("gelu")
    with pytest.raises(
        StrategyError, match="blocks.0.mlp.down, and nbkit cannot show that this is right".replace(".", r"\.")
    ):
        plan_of(wrong, 2, SAID, prove(wrong, lambda: wrong(IDS), [2], SAID))
    with pytest.raises(StrategyError, match="example=batch"):
        plan_of(right, 2, SAID)
    assert len(plan_of(right, 2, SAID, prove(right, lambda: right(IDS), [2], SAID)).pairs) == 2
    gathered = {"blocks.*.mlp.up": "colwise_gather", "blocks.*.mlp.down": "rowwise_split"}
    assert plan_of(wrong, 2, gathered, prove(wrong, lambda: wrong(IDS), [2], gathered)).singles.keys() >= {
        "blocks.0.mlp.up",
        "blocks.0.mlp.down",
    }


def test_check_reports_modules_that_stay_whole_and_why() -> None:
    found = nbkit.check(built("softmax, deep"), "tp=2", BATCH)
    rows = {row[0]: row[1:] for row in found.rows}

    assert found.ok
    assert rows["blocks.*.attn.q"][0] == "columns: 4 heads over 2"
    assert rows["blocks.*.mlp.up"][0] == "whole"
    assert "what goes into down differs from the whole" in rows["blocks.*.mlp.up"][1]
    assert "blocks.*.mlp: every rank of the tensor axis keeps this whole" in found.findings[0].what
    unread = nbkit.check(built("gelu"), "tp=2")
    assert "no example batch" in str(unread) and "nbkit.check(model, strategy, batch)" in str(unread)
    assert "heads / tp 3" in str(nbkit.check(built("attention"), "tp=3", BATCH))


def told(world: Any) -> tuple[list[str], list[str], int]:
    import warnings

    def batches() -> Any:
        yield from ((row, target) for row, target in zip(*BATCH, strict=True))

    asked: dict[str, Any] = {"loss": cross_entropy, "optimizer": sgd, "batch_size": 4, "log_dir": None}
    asked |= {"strategy": "tp", "progress": False}

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return batches()

    found = []
    for more in ({}, {"hints": nbkit.ModelHints(example=BATCH)}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = Trainer(model=lambda: built("gelu"), data=Rows(), **asked, **more)
        found.append([str(warning.message) for warning in caught])
    return found[0], found[1], len(trainer.job.builder.facts.tensor_plan(2, None).pairs)


def test_a_job_warns_of_whole_modules_unless_an_example_is_given() -> None:
    without, given, pairs = run_ranks(told, 2, timeout=120)[0]

    assert any("blocks.*.mlp" in text and "there was no example batch" in text for text in without)
    # A warning that data cannot be divided comes in any case.
    assert [text for text in given if "every rank reads all" not in text] == [] and pairs == 2


def test_uneven_features_are_accepted_and_heads_that_do_not_divide_refused() -> None:
    model = Model(lambda: nn.Sequential(nn.Linear(WIDTH, INNER + 1), nn.GELU(), nn.Linear(INNER + 1, WIDTH)))
    assert verdict_of(model.double()).wrong == {}
    model = Model(lambda: Block(between.Attention(), between.MLP(gelu, None)))
    assert (
        verdict_of(model.double(), 3).wrong == {}
    )  # 4 heads cannot be divided by 3 ranks are refused with the numbers
    with pytest.raises(StrategyError, match="4 heads cannot be divided by 3 ranks"):
        plan_of(model, 3, None, prove(model, lambda: model(IDS), [3]))


def test_a_model_that_fails_on_its_example_stays_whole() -> None:
    model = built("gelu")
    proof = prove(model, lambda: F.linear(IDS.double(), torch.ones(2, 3)), [2])

    assert "the model fails with the example batch: RuntimeError" in proof.why
    assert plan_of(model, 2, None, proof).pairs == ()
