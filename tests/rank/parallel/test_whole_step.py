"""Test that a tiny whole step of each strategy equals that of one process. The ranks are threads of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.comm.thread_group import ThreadMeeting, ThreadRanks
from nbkit.rank.data.batch import call
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel import grad_norm, process_groups, sharded_model, whole_step
from nbkit.rank.parallel import whole_step as proof_of_step
from nbkit.rank.parallel.data_parallel.zero1_2 import ShardedOptimizer
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import Coupled, ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.pipeline.layer_chain import find_chain
from nbkit.rank.parallel.plan import ParallelPlan, make_plan
from nbkit.rank.parallel.tensor.proof.prove import prove
from nbkit.rank.parallel.whole_step import StepProof, prove_step, tiny
from nbkit.rank.parallel.zero3.gather_plan import plan_gathers
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.rank.train.job import prepare
from nbkit.rank.train.step.optimizer_factory import OptimizerSpec
from nbkit.strategy import Strategy
from verify.models.specimens import ZOO
from verify.training import ARCHITECTURES

COMPOSED = {
    "dp=2": 2,
    "dp=2 zero=2": 2,
    "dp=4 zero=3 shard=2": 4,
    "dp=2 tp=2": 4,
    "dp=2 pp=2 zero=1": 4,
    "pp=2 schedule=dualpipev": 2,
    "pp=2 tp=2": 4,
    "cp=2 tp=2": 4,
    "dp=2 cp=2 zero=3": 4,
    "dp=2 tp=2 pp=2": 8,
}


def decayed_by_name(model: nn.Module) -> torch.optim.Optimizer:
    kinds, named = ("tokens.weight", "blocks.0"), dict(model.named_parameters())
    first = [p for name, p in named.items() if name.startswith(kinds)]
    rest = [p for name, p in named.items() if not name.startswith(kinds)]
    return torch.optim.AdamW(
        [{"params": first, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-4}], lr=3e-4
    )


class Facts:
    """The facts that a job finds once, here for the zoo's tied GPT with dropout."""

    def __init__(self) -> None:
        zoo = ZOO["gpt_tied"]
        model = zoo.build().train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.1
        self.example, self.loss = zoo.batch(2), zoo.loss

        def run() -> Any:
            return call(model, self.example[0])

        found = {"chain": find_chain(model, run), "proof": prove(model, run, [2]), "gathers": plan_gathers(model, run)}
        self.found = ModelFacts(ModelShapes(skeleton_of(model)), **found)
        self.template = OptimizerSpec(decayed_by_name, module=model)

    def proof(self, text: str, loss: Any = None, **asked: Any) -> StepProof:
        strategy = Strategy.parse(text, COMPOSED[text])
        given = {"inputs": None, "loss": loss or self.loss, "optimizer": self.template.on_cpu}
        return prove_step(ParallelPlan(strategy, self.found, JobOptions()), self.example, **given | asked)

    def refusal(self, text: str, loss: Any = None, **asked: Any) -> NbkitError | None:
        found = self.proof(text, loss, **asked)
        assert not found.unproven or found.refusal is not None, found.unproven
        return found.refusal


@pytest.fixture(scope="module")
def facts() -> Iterator[Facts]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the operations are small, so threads would mostly wait for each other
    yield Facts()
    torch.set_num_threads(threads)


def test_every_composed_strategy_makes_the_step_of_one_process(facts: Facts) -> None:
    def small(output: Any, target: Any) -> Any:
        return facts.loss(output, target) / 100  # a small norm shows errors in the epsilon of clipping

    assert facts.refusal("dp=2 zero=2", small) is None
    assert {text: found for text in COMPOSED if (found := facts.refusal(text)) is not None} == {}
    assert facts.refusal("dp=2", microbatch_size=4) is None


def unsummed(model: Any, names: Any, group: Any) -> None:
    pass


def counted_twice(held: Any, replication: Any, **how: Any) -> torch.Tensor:
    return grad_norm.grad_norm(held, {}, **how)


def doubled(output: Any, target: Any) -> torch.Tensor:
    return ZOO["gpt_tied"].loss(output, target) * len(target)


def not_a_number(held: Any, *_: Any, **__: Any) -> torch.Tensor:
    return next(iter(held.values())).grad.sum() * torch.nan


def clipped_alone(held: Any, max_norm: float, norm: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(held.values(), max_norm)


# a bug around the blocks -> (object, attribute, replacement, strategy, words)
PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str, str]] = {
    "a tied weight whose gradients are not summed": (
        sharded_model.ShardedModel, "_sum", unsummed, "dp=2 pp=2 zero=1", "gradient of 'tokens.weight'"),
    "weights of which several ranks hold the same": (
        sharded_model, "grad_norm", counted_twice, "dp=2 tp=2", "norm of the gradients"),
    "a norm that is no number": (
        sharded_model, "grad_norm", not_a_number, "dp=2 zero=2", "norm of the gradients nan"),
    "gradients that are clipped by the norm of a rank's own": (
        whole_step, "clip", clipped_alone, "dp=2 zero=2", "gradient of"),
    "updated parts that nobody gathers": (
        ShardedOptimizer, "after_step", lambda _: None, "dp=2 zero=2", "update of"),
    "stages that are tied to nobody": (
        process_groups, "_ties", lambda *_: (), "pp=2 tp=2", "gradient of 'tokens.weight'"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_bugs_around_the_blocks_are_refused_by_name(name: str, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, broken, text, words = PLANTED[name]
    monkeypatch.setattr(where, attribute, broken)
    refused = facts.refusal(text)
    assert isinstance(refused, StrategyError) and "as one process does" in refused.what, name
    assert words in refused.numbers, refused.numbers


@pytest.mark.parametrize(
    "text",
    [
        "dp=2 zero=2",
        "pp=2 tp=2",
        *(pytest.param(more, marks=pytest.mark.long) for more in ("dp=2", "dp=4 zero=3 shard=2")),
    ],
)
def test_a_parameter_in_the_wrong_group_of_the_optimizer_is_refused(text: str, facts: Facts) -> None:
    (last, *_), _ = facts.template.groups

    def put_astray(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = decayed_by_name(model)
        first, rest = optimizer.param_groups
        rest["params"].append(first["params"].pop(0))
        return optimizer

    astray = OptimizerSpec(put_astray, module=facts.found.shapes.skeleton)

    def optimizer(held: Any, plainly: bool) -> Any:
        return (facts.template if plainly else astray).on_cpu(held, plainly)

    refused = facts.proof(text, optimizer=optimizer).refusal
    assert refused is not None and f"update of {last!r}" in refused.numbers


def test_gradients_are_compared_even_if_the_optimizer_runs_only_on_gpus(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no kernel image")

    def optimizer(held: Any, plainly: bool) -> Any:
        return Kernels(held.values(), lr=0.1)

    found = facts.proof("pp=2 tp=2", optimizer=optimizer)
    assert found.refusal is None and "no kernel image" in found.unproven
    monkeypatch.setattr(process_groups, "_ties", lambda *_: ())
    assert facts.proof("pp=2 tp=2", optimizer=optimizer).refusal is not None


def test_a_loss_that_is_no_mean_and_a_model_that_fails_in_stages_are_refused(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = facts.refusal("dp=2", doubled)
    assert refused is not None and "loss" in refused.numbers

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("weight")

    monkeypatch.setattr(sharded_model.ShardedModel, "stage", fails)
    refused = facts.refusal("pp=2 tp=2")
    assert refused is not None and "of this model fails" in refused.what and "KeyError" in refused.numbers


def test_deadlocks_and_different_collectives_of_thread_ranks_raise() -> None:
    def waits(rank: int) -> None:
        group, x = meeting.group_of(rank), torch.zeros(1)
        if rank:
            torch.distributed.all_reduce(x, group=group)
        else:
            group.recv([x], 1, 0).wait()

    def differ(rank: int) -> None:
        torch.distributed.all_reduce(torch.zeros(1 + rank), group=meeting.group_of(rank))

    for body, words in ((waits, "wait for each other"), (differ, "other collectives")):
        ranks: ThreadRanks[None] = ThreadRanks(2)
        meeting = ThreadMeeting(ranks, (0, 1))
        with pytest.raises(RuntimeError, match=words):
            ranks.run(body)


def asked_of_ranks(world: Any) -> list[str]:
    process_groups._ties = lambda *_: ()  # this is a separate forked process
    zoo = ZOO["gpt_tied"]
    batch, found = zoo.batch(8), []

    def job(strategy: str, *, example: Any) -> Any:
        return prepare(
            zoo.build(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=zoo.loss,
            strategy=strategy,
            hints=nbkit.ModelHints(example=example),
            log_dir=None,
        )

    try:
        job("pp", example=zoo.batch(2))
    except StrategyError as error:
        found.append(str(error))
    going = job("ddp", example=zoo.batch(2))
    for step, each in enumerate(going.batches([batch] * 3)):
        going.backward(each)
        going.optimizer.step()
        going.optimizer.zero_grad()
        if step == 0:
            try:
                going.switch("pp")
            except NbkitError as error:
                found.append(str(error))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        job("zero1", example=None)
    unproven = [str(each.message) for each in said if "Only a part of" in str(each.message)]
    return [*found, *unproven, str(going.strategy), str(going.step)]


@pytest.mark.long
def test_a_job_refuses_to_start_with_or_switch_to_a_wrong_step(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in run_ranks(asked_of_ranks, 2):
        assert len(found) == 5, found
        assert all("gradient of 'tokens.weight'" in text for text in found[:2]), found
        assert "dp=2 zero=1" in found[2] and "example=" in found[2]
        assert found[3:] == ["dp=2", "3"]
    zoo = ZOO["gpt_tied"]
    assert nbkit.check(zoo.build(), "pp", zoo.batch(8), 2, loss=zoo.loss).ok
    said = nbkit.check(zoo.build(), "pp", world_size=2)
    assert said.ok and "no whole step: no example" in str(said)
    monkeypatch.setattr(process_groups, "_ties", lambda *_: ())
    said = nbkit.check(zoo.build(), "pp", zoo.batch(8), 2)
    assert not said.ok and "gradient of 'tokens.weight'" in str(said)


# (model, strategy) that once trained wrong, or failed after check had said "fits". make zoo has the rest.
ONCE = {
    "a tied head and an embedding of another class": ("gemma2", "tp=2"),
    "a bias of all heads from outside": ("bloom", "tp=2"),
    "the dtype of a weight of another stage": ("vit", "pp=2"),
}


@pytest.mark.parametrize(
    "what", [what if "tied" in what else pytest.param(what, marks=pytest.mark.long) for what in ONCE]
)
def test_models_that_once_trained_wrong_make_the_step_of_one_process(what: str, facts: Facts) -> None:
    name, strategy = ONCE[what]
    specimen = ARCHITECTURES[name]
    torch.manual_seed(0)
    model, batch = specimen.build().double(), specimen.batch(4, dtype=torch.float64)
    said = nbkit.check(model, strategy, batch, 2, loss=specimen.loss)
    assert said.ok, str(said)


@pytest.mark.long
def test_a_cut_is_refused_with_the_reason_if_one_process_cannot_make_the_step(facts: Facts) -> None:
    calls = iter(range(1, 1000))

    def drifting(output: Any, target: Any) -> Any:
        return facts.loss(output, target) * next(calls)

    def breaking(output: Any, target: Any) -> Any:
        raise KeyError("mask")

    def endless(output: Any, target: Any) -> Any:
        return facts.loss(output, target) / 0

    for loss, words in (
        (drifting, "gets another result for the same step"),
        (breaking, "KeyError: 'mask'"),
        (endless, "the loss is inf"),
    ):
        assert words in facts.proof("dp=2", loss).unproven
        assert facts.proof("dp=2", loss).refusal is None
        refused = facts.proof("pp=2 tp=2", loss).refusal
        assert isinstance(refused, StrategyError) and words in refused.numbers and "ddp" in refused.hint, words


def test_checks_that_were_not_run_are_reported(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"loss": facts.loss, "inputs": None}
    assert "example=" in prove_step(make_plan(Strategy(tp=2), facts.found), None, **asked).unproven
    drawing = replace(facts.found, draws=DrawPlan(unkeyed=("randperm in blocks.0",)))
    found = prove_step(make_plan(Strategy(pp=2), drawing), facts.example, **asked)
    assert found.refusal is None and "randperm in blocks.0" in found.unproven
    found = prove_step(ParallelPlan(Strategy(tp=64), facts.found, JobOptions()), facts.example, **asked)
    assert found.refusal is None and "64 ranks" in found.unproven
    monkeypatch.setattr(proof_of_step, "_EXACT", 1000)
    monkeypatch.setattr(proof_of_step, "free_on_host", lambda: 10_000_000)
    assert facts.proof("pp=2 tp=2") == StepProof()
    monkeypatch.setattr(proof_of_step, "free_on_host", lambda: 10_000)
    assert "of the 0.0 GB that are free on the host" in facts.proof("pp=2 tp=2").unproven
    monkeypatch.setattr(proof_of_step, "WIDE", 1000)
    assert "more than 0 M" in facts.proof("pp=2 tp=2").unproven


def test_a_loss_in_pieces_without_an_example_is_said_to_be_not_compared(facts: Facts) -> None:
    plain, pieces = (
        prove_step(ParallelPlan(Strategy(dp=2), facts.found, options), None, loss=facts.loss, inputs=None).unproven
        for options in (JobOptions(), JobOptions(loss_chunks=2))
    )
    assert not plain and pieces.startswith("no whole step: no example batch")


@pytest.mark.long
@pytest.mark.parametrize("text", ["dp=2 tp=2", "dp=4 zero=3 shard=2", "dp=2 pp=2 zero=1"])
def test_a_gpt_of_70_million_parameters_makes_the_step_of_one_process(text: str, facts: Facts) -> None:
    """Check that rounding does not refuse it: embedding and head have 26 million float32 elements each."""
    model = GPT(GPTConfig(vocab=50_304, width=512, layers=6, heads=8, block=64))
    rows = torch.randint(0, 50_304, (8, 65))

    def loss(logits: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    said = nbkit.check(model, text, (rows[:, :-1], rows[:, 1:]), COMPOSED[text], loss=loss)
    assert said.ok and "no whole step" not in str(said), str(said)


def test_a_step_of_many_ranks_is_tried_with_fewer_stages() -> None:
    assert tiny(Strategy(dp=8, tp=4, pp=16)) == Strategy(dp=2, tp=4, pp=4, microbatches=32)
    assert tiny(Strategy(dp=8, zero=3, shard=4, cp=16)) == Strategy(dp=4, zero=3, shard=2, cp=8)


@pytest.mark.long
def test_a_loss_with_an_auxiliary_term_is_compared_with_the_same_parts_in_one_process(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def balanced(output: Any, target: Any) -> Any:
        return facts.loss(output, target) + output.mean((0, 1)).square().sum()

    assert facts.refusal("dp=2 pp=2 zero=1", balanced) is not None
    monkeypatch.setattr(facts, "found", replace(facts.found, coupled=Coupled("a term", "", "", trains=True)))
    assert facts.refusal("dp=2 pp=2 zero=1", balanced) is None
    monkeypatch.setattr(sharded_model.ShardedModel, "_sum", unsummed)
    refused = facts.refusal("dp=2 pp=2 zero=1", balanced)
    assert refused is not None and "gradient of 'tokens.weight'" in refused.numbers


class Rates(nn.Module):
    """A model that uses the logarithm of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(4, 4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.rates.log()


def test_a_model_with_logarithms_of_weights_is_tried_with_positive_weights() -> None:
    example = (torch.randn(2, 4), torch.randn(2, 4))
    plan = make_plan(Strategy(dp=2, zero=3), ModelFacts(ModelShapes(skeleton_of(Rates()))))
    found = prove_step(plan, example, loss=nn.functional.mse_loss, inputs=None)
    assert found == StepProof()


def begun_on_inputs(world: Any) -> list[str]:
    """Return the warnings of a job whose `example=` is the model's input instead of a batch."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        job = prepare(
            nn.Linear(4, 4),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.mse_loss,
            strategy="ddp",
            hints=nbkit.ModelHints(example=torch.randn(2, 4)),
            log_dir=None,
        )
        job.backward((torch.randn(4, 4), torch.randn(4, 4)))
    return [str(each.message) for each in said]


def test_an_example_that_is_no_batch_gives_a_warning() -> None:
    for said in run_ranks(begun_on_inputs, 2):
        assert any("Only a part of dp=2" in text and "a batch is Tensor" in text for text in said), said
