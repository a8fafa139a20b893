"""Test that mixtures whose tokens choose experts train as one process. If experts choose or drop tokens, refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import nbkit
from nbkit.errors import NbkitError
from nbkit.planner.exchange import overlap
from nbkit.rank.parallel.experts import data_axis, dispatch
from nbkit.rank.parallel.experts.find import find_routed
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.plan import ParallelPlan, make_plan
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.parallel.whole_step import StepProof, prove_step
from nbkit.rank.telemetry import collectives
from nbkit.rank.train.estimate.state_bytes import StateBytes
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy
from nbkit.trainer_options import RECOMPUTE
from verify.models.specimens import exact

VOCAB, LENGTH, WIDTH, BATCH, STEPS = 48, 12, 16, 8, 2


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Experts(nn.Module):
    """A mixture that sends each token to two experts by its router. No token goes to the last expert."""

    def __init__(self, num: int = 6) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, num), nn.ModuleList(Expert() for _ in range(num))
        with torch.no_grad():
            self.router.bias[-1] = -1e3

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        given = torch.zeros_like(tokens)
        for chosen, weights, expert in self.routed(self.router(tokens).softmax(-1)):
            if len(chosen):  # an expert without tokens has no gradient
                given = given.index_add(0, chosen, expert(tokens[chosen]) * weights[:, None])
        return x + given.view_as(x)

    def routed(self, scores: Tensor) -> Any:
        weights, choice = scores.topk(2)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(choice == number)
            yield token, weights[token, slot], expert


class ExpertsChoose(Experts):
    """A mixture after Zhou et al. 2022: each expert takes the tokens that it prefers."""

    def routed(self, scores: Tensor) -> Any:
        for number, expert in enumerate(self.experts):
            weights, chosen = scores[:, number].topk(len(scores) // 2)
            yield chosen, weights, expert


class ExpertsDrop(Experts):
    """A mixture after Fedus et al. 2022: in training, an expert takes a limited number of tokens and drops the rest."""

    def routed(self, scores: Tensor) -> Any:
        room = len(scores) // len(self.experts) if self.training else len(scores)
        for token, weights, expert in super().routed(scores):
            yield token[:room], weights[:room], expert


class SkipsRows(Experts):
    """A mixture that sends the tokens of some rows to no expert, so it does not change them."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = (x[:, :1, 0] > 0).expand(x.shape[:2]).flatten()
        return super().forward(x)

    def routed(self, scores: Tensor) -> Any:
        for token, weights, expert in super().routed(scores):
            kept = self.kept[token]
            yield token[kept], weights[kept], expert


class PassesRowsBy(nn.Module):
    """A module that sends only the tokens of some rows to a mixture."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0, 0] > 0).nonzero().flatten()
        return x.index_copy(0, chosen, self.mixture(x[chosen]))


class Dense(Experts):
    """A mixture with the same sums as Experts, which computes all experts for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).softmax(-1).topk(2)
        shares = torch.zeros(*x.shape[:-1], len(self.experts)).to(x).scatter(-1, choice, weights)
        return x + sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Language(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Experts, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attending(Language):
    """A model with attention before the experts."""

    def __init__(self, kind: Callable[[], nn.Module] = Experts) -> None:
        super().__init__(lambda: AttendsThenRoutes(kind))


class AttendsThenRoutes(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.qkv, self.experts = nn.Linear(WIDTH, 3 * WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return self.experts(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class OneLayer(Experts):
    """A mixture whose experts are its only list of modules, so zero 3 gathers the experts."""

    def __init__(self) -> None:
        super().__init__(10)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(super().forward(self.embedding(ids)))


def hf(name: str, **changed: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    sizes |= {"num_experts_per_tok": 2, "use_cache": False, "experts_implementation": "eager"}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, f"{name}Config")(**(sizes | changed))
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4 if param.ndim > 1 else 1)  # so that routers have preferences
    return exact(model)


def mixtral(**changed: Any) -> nn.Module:
    return hf("Mixtral", num_local_experts=4, **changed)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "olmoe": lambda: hf("Olmoe", num_experts=4),
    "qwen2 moe": lambda: hf(
        "Qwen2Moe", num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=24
    ),
    "top two": Language,
    "one layer": OneLayer,
    "dense": lambda: Language(Dense),
}  # fmt: skip
# A strategy gathers experts (even those without rows on a rank), divides positions, or keeps experts whole.
CASES = [("mixtral", ("zero3", "cp=2")), ("qwen2 moe", ("tp",)), ("one layer", ("zero3",))]
REST = [
    ("mixtral", ("ddp", "pp", "tp")),
    ("olmoe", ("zero3",)),
    ("top two", ("zero1", "tp")),
    ("dense", ("zero2",)),
]
MOVED = ("dp=2 tp=2 ep=2 experts=0:0-3+1:1-2", "dp=2 cp=2 ep=2 experts=1:0-2", "dp=2 pp=2 ep=2 experts=0:0-3")
CHANGED: dict[str, dict[str, Any]] = {"zero3": {"compute": nbkit.Compute(microbatch_size=2)}}
CHANGED |= {strategy: {"compute": nbkit.Compute(recompute=True)} for strategy in MOVED}
# In some forwards, a layer of experts gets no tokens.
SPARSE = ("dp=4 ep=2", "zero3 ep=4")
CHANGED |= {strategy: {"compute": nbkit.Compute(recompute=True, microbatch_size=1)} for strategy in SPARSE}


def rows(count: int = 2 * BATCH) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return list(zip(ids, ids.roll(-1, 1), strict=True))


def labelled() -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids, _ in rows()]


def loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def inside(output: Any, _: Any) -> Tensor:
    found: Tensor = output.loss
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def made(model: Callable[[], nn.Module], strategy: str, **changed: Any) -> Trainer:
    asked: dict[str, Any] = {"loss": loss, "optimizer": adamw, "data": rows(), "batch_size": BATCH}
    asked["loading"] = nbkit.Loading(shuffle=False)
    return Trainer(model=model, strategy=strategy, log_dir=None, progress=False, **(asked | changed))


def one_process(build: Callable[[], nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    """Return (losses, final weights) of plain torch over whole batches."""
    torch.manual_seed(0)
    model = build()
    optimizer, losses = adamw(model), []
    batches = list(DataLoader(rows(), batch_size=BATCH))
    for step in range(STEPS):
        ids, target = batches[step % len(batches)]
        found = loss(model(ids), target)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(world: Any, cases: list[tuple[str, tuple[str, ...]]]) -> dict[tuple[str, str], float]:
    found = {}
    for name, strategies in cases:
        build = (MODELS | MORE_MODELS)[name]
        losses, weights = one_process(build)
        for strategy in strategies:
            trainer = made(build, strategy, **CHANGED.get(strategy, {}))
            history = trainer.fit(STEPS)
            after = trainer.full_state_dict()
            wrong = max(abs(record["loss"] - other) for record, other in zip(history, losses, strict=True))
            wrong = max(wrong, *(float((after[key] - p).abs().max()) for key, p in weights.items()))
            found[name, strategy] = wrong
    return found


HALVES = "dp=2 pp=2 ep=2 microbatches=4 schedule="
# A micro-batch has one row here, so in some of them a layer of experts gets no tokens.
TOGETHER = [
    ("listed", (f"{HALVES}zbv", f"{HALVES}dualpipev")),
    ("skipped", SPARSE),
    ("stacked", (f"{HALVES}zb", "dp=4 zero=3 shard=2 ep=2", "dp=4 zero=1 shard=2 ep=4", *SPARSE)),
    ("mixtral", MOVED),
]


def stacked_and_passed_by() -> nn.Module:
    model: Any = mixtral(num_hidden_layers=4)
    for layer in model.model.layers:
        layer.mlp = PassesRowsBy(layer.mlp)
    return model  # type: ignore[no-any-return]


def some_choose_no_expert() -> nn.Module:
    """Return a mixture of stacked experts that replaces some choices by the number after the last expert."""
    model: Any = mixtral()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _, args, given: (given[0], given[1], given[2].masked_fill(given[1] < 0.3, 4))
        )
    return model  # type: ignore[no-any-return]


MORE_MODELS = {
    "some choose none": some_choose_no_expert,
    "listed": lambda: Language(lambda: PassesRowsBy(Experts()), 4),
    "skipped": lambda: Language(SkipsRows),
    "stacked": stacked_and_passed_by,
}


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("case", TOGETHER)
def test_spread_experts_work_with_split_backward_passes_and_every_axis(
    case: tuple[str, tuple[str, ...]],
) -> None:
    found = run_ranks(trained, 4, [case], timeout=170)[0]

    assert {key: wrong for key, wrong in found.items() if not wrong < 1e-9} == {} and len(found) == len(case[1])


@pytest.mark.usefixtures("known_to_be_right")  # the test compares them at full size
@pytest.mark.parametrize("cases", [CASES, pytest.param(REST, marks=pytest.mark.long)])
def test_mixtures_whose_tokens_choose_experts_train_as_one_process(cases: list[tuple[str, tuple[str, ...]]]) -> None:
    found = run_ranks(trained, 2, cases, timeout=170)[0]

    assert {name for name, _ in CASES + REST} == set(MODELS)
    assert {key: wrong for key, wrong in found.items() if not wrong < 1e-9} == {}
    assert len(found) == sum(len(strategies) for _, strategies in cases)


def said(act: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except NbkitError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


def balanced() -> nn.Module:
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.01)


KINDS = (ExpertsChoose, ExpertsDrop)


def refused(world: Any) -> dict[str, str]:
    found = {"choose": said(lambda: made(lambda: Language(ExpertsChoose), "ddp"))}
    found["drop, positions"] = said(lambda: made(lambda: Attending(ExpertsDrop), "cp=2"))
    found["tp, not run"] = said(lambda: nbkit.prepare(mixtral, adamw, strategy="tp", log_dir=None, loss=loss))
    return found


def stacked() -> list[Tensor]:
    return [torch.stack(part) for part in zip(*rows(), strict=True)]


@pytest.mark.long
def test_tp_splits_attention_and_keeps_experts_whole() -> None:
    how = {path: (split, why) for path, split, why in nbkit.check(mixtral, "tp", stacked(), 2).rows}

    assert how["model.layers.*.self_attn.q_proj"][0].startswith("columns: 2 heads over 2")
    assert how["model.layers.*.mlp.experts"] == ("whole", "a mixture of experts stays whole on each rank")


@pytest.mark.long
def test_experts_with_grouped_products_can_be_pipeline_stages() -> None:
    """Check it because output shapes are found on meta weights, which torch's grouped product does not accept."""
    checked = nbkit.check(lambda: mixtral(experts_implementation="grouped_mm").float(), "pp", stacked(), 2)

    assert "cannot show that" not in str(checked) and "fits" in str(checked).splitlines()[0], str(checked)


@pytest.mark.long
def test_mixtures_in_which_rows_compete_are_refused_by_name() -> None:
    found, other = run_ranks(refused, 2, timeout=120)

    assert found == other
    looked_at = [nbkit.check(lambda kind=kind: Language(kind), "ddp", stacked(), 2) for kind in KINDS]  # type: ignore[misc]
    for text in (found["choose"], *map(str, looked_at)):
        assert "The model mixes the rows of a batch: the output of 'layers.0'" in text
    assert "'layers.0'" in found["drop, positions"] and "positions" in found["drop, positions"]
    assert (
        "'model.layers.0.mlp' is a mixture of experts" in found["tp, not run"]
        and "no example batch" in found["tp, not run"]
    )


def warned(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    labels: dict[str, Any] = {"data": labelled(), "inputs": ["input_ids", "labels"], "loss": inside}
    trainers: list[Trainer] = []
    found["trainer"] = said(lambda: trainers.append(made(balanced, "ddp", **labels)))
    (record,) = trainers[0].fit(1)
    torch.manual_seed(0)
    model, batch = balanced(), stacked()[0][:BATCH]
    halves = [float(model(input_ids=half, labels=half).loss.detach()) for half in batch.split(BATCH // 2)]
    found["away"] = abs(record["loss"] - sum(halves) / 2)
    (record,) = made(balanced, "tp", **labels).fit(1)
    found["away under tp"] = abs(record["loss"] - float(model(input_ids=batch, labels=batch).loss.detach()))
    for strategy in ("zero3",):

        def loop(strategy: str = strategy) -> None:
            job = nbkit.prepare(balanced, adamw, strategy=strategy, log_dir=None, loss=inside, inputs=labels["inputs"])
            for batch in job.batches(DataLoader(labelled(), batch_size=BATCH)):
                job.backward(batch)
                break

        found[f"loop {strategy}"] = said(loop)
    found["unbalanced"] = said(lambda: made(mixtral, "ddp", **labels))
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")  # check makes the whole step
def test_a_load_balancing_loss_trains_as_the_mean_of_the_ranks_with_a_warning() -> None:
    found = run_ranks(warned, 2, timeout=120)[0]

    assert found["away"] < 1e-7  # transformers rounds to float32 on the way
    assert found["away under tp"] < 1e-6  # under tp, the routers see the whole batch; the loss is in float32
    for name in ("trainer", "loop zero3"):
        assert "computes an auxiliary loss over all rows" in found[name] and "'aux_loss'" in found[name], name
    batch = stacked()[0][:BATCH]
    looked_at = nbkit.check(
        balanced, "ddp", {"input_ids": batch, "labels": batch}, 2, inputs=["input_ids", "labels"], loss=inside
    )
    assert looked_at.ok and "an auxiliary loss" in str(looked_at)
    assert found["unbalanced"] == ""


SHORT, CLIP = 19, 0.3
# Experts are at their own places, or at those of experts on other ranks.
CHAIN = (
    "dp=4 ep=4",
    "ep=4 experts=0:0-2-3+1:1-3",
    "ddp",
    "zero3 ep=2 experts=0:0-3+1:1-2",
    "zero3 ep=2",
    "ep=2 experts=1:0-2",
    "zero3 shard=2 ep=2",
    "zero3 ep=4 experts=0:1-3",
    "zero1 ep=2",
    "zero2 ep=2 experts=0:0-2,1-3",
    "zero3",
    "ep=4",
    "ddp",
)
EPOCH = 3
"""Steps under each strategy of the chain: one epoch, whose last batch has 3 rows, so rank 3 has none."""


def clipped(build: Callable[[], nn.Module], steps: int) -> tuple[list[float], list[float], nn.Module]:
    """Return (losses, norms, model) of plain torch over whole batches."""
    torch.manual_seed(0)
    model = build()
    optimizer, losses, norms = adamw(model), [], []
    batches = [rows(SHORT)[start : start + BATCH] for start in range(0, SHORT, BATCH)]
    for step in range(steps):
        ids, target = (torch.stack(part) for part in zip(*batches[step % len(batches)], strict=True))
        found = loss(model(ids), target)
        optimizer.zero_grad()
        found.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(found.item())
    return losses, norms, model


def through_the_chain(
    world: Any, name: str, chain: Sequence[str], folder: str, recompute: bool | str
) -> dict[str, Any]:
    """Train through switches, a save, a load and another strategy. Return all differences from one process.

    recompute: as in nbkit.Compute.
    """
    asked: dict[str, Any] = {"data": rows(SHORT), "clip_norm": CLIP}
    losses, norms, model = clipped(MODELS[name], EPOCH * (len(chain) + 2))
    trainer = made(MODELS[name], "ddp", compute=nbkit.Compute(microbatch_size=1, recompute=recompute), **asked)
    trainer.fit(EPOCH)
    for strategy in chain:
        trainer.switch(strategy)
        trainer.fit(EPOCH)
    trainer.save(Path(folder) / "saved")
    again = made(MODELS[name], "ep=2", compute=nbkit.Compute(recompute=recompute), **asked)
    again.load(Path(folder) / "saved")
    collectives.set_mode("count")
    began = collectives.ring.end
    again.fit(EPOCH - 1)
    routed = [dict(layer) for layer in again.job.sharded_model.data.routed]
    uneven = again.history[-1]["imbalance"]
    again.fit(1)
    calls = collectives.ring.between(began, collectives.ring.end)[0]
    away: dict[str, float] = {}
    for number, record in enumerate(again.history):
        key = f"{number + 1}: {record['strategy']}"
        away[key] = max(abs(record["loss"] - losses[number]), abs(record["grad_norm"] - norms[number]))
    whole = again.full_state_dict()
    away["weights"] = max(float((whole[key] - p.detach()).abs().max()) for key, p in model.named_parameters())
    ids, target = (torch.stack(part) for part in zip(*rows(SHORT), strict=True))
    with torch.no_grad():
        away["evaluation"] = abs(again.evaluate(rows(SHORT), batch_size=5) - float(loss(model.eval()(ids), target)))
    sent = sum(call.bytes for call in calls if call.axis == "ep" and call.op == "all_to_all")
    terms = again.job.cost_model().of_all_ranks(again.job.strategy)
    said = [term.bytes for term in terms if term.axis == "ep"]
    return {"away": away, "sent": sent, "predicted": said, "routed": routed, "uneven": uneven}


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("name", "chain", "recompute"),
    [
        ("top two", CHAIN[:4], False),
        pytest.param("top two", CHAIN[4:], False, marks=pytest.mark.long),
        pytest.param("mixtral", CHAIN, False, marks=pytest.mark.long),
        pytest.param("top two", CHAIN[:5], True, marks=pytest.mark.long),
        pytest.param("mixtral", CHAIN[3:8], True, marks=pytest.mark.long),
        pytest.param("top two", CHAIN[:5], "selective", marks=pytest.mark.long),
        pytest.param("mixtral", CHAIN[3:8], "selective", marks=pytest.mark.long),
    ],
)
def test_spread_experts_train_through_switches_as_one_process(
    name: str, chain: Sequence[str], recompute: bool | str, tmp_path: Path
) -> None:
    found = run_ranks(through_the_chain, 4, name, chain, str(tmp_path), recompute, timeout=300)

    away = found[0]["away"]
    assert {key: off for key, off in away.items() if not off < 1e-9} == {}
    assert len(away) == EPOCH * (len(chain) + 2) + 2
    # Two layers send each token to two experts and back, in forward and in backward. A recomputed forward sends it
    # again; selective recomputation sends nothing.
    tokens = 2 * (6 if recompute is True else 4) * 2 * LENGTH * WIDTH * 8
    assert 1 <= sum(rank["sent"] for rank in found) / (SHORT * tokens) <= 1.01
    assert 1 <= found[0]["predicted"][0] / (BATCH * tokens) <= 1.02
    # Each rank computes all tokens that were sent to its half of the experts, so no token is lost.
    held = [[set(layer) for layer in rank["routed"]] for rank in found]
    computed = [[sum(layer.values()) for layer in rank["routed"]] for rank in found]
    assert held[0] == held[2] and held[1] == held[3] and not held[0][0] & held[1][0]
    assert sum(map(sum, computed)) == BATCH * LENGTH * 2 * 2
    # In each layer, the ranks of a group wait for the rank with most tokens.
    waited = [sum(max(pair) for pair in zip(*computed[at : at + 2], strict=True)) for at in (0, 2)]
    assert found[0]["uneven"] == pytest.approx(4 * max(waited) / sum(map(sum, computed)))


def facts_of(build: Callable[[], nn.Module]) -> ModelFacts:
    model = build()
    return ModelFacts(ModelShapes(skeleton_of(model)), routed=find_routed(model, lambda: model(stacked()[0][:2])))


def stepped(facts: ModelFacts, strategy: str, **asked: Any) -> StepProof:
    """Compare a step with one process, with an optimizer that moves weights even without a gradient."""
    plan, few = make_plan(Strategy.parse(strategy, 4), facts, JobOptions(**asked)), [part[:2] for part in stacked()]

    def decayed(held: Mapping[str, nn.Parameter], plainly: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(held.values(), lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False)

    return prove_step(plan, few, loss=loss, inputs=None, optimizer=decayed)


def times(factor: float) -> Any:
    backward = dispatch._Exchange.backward

    def changed(ctx: Any, grad: Tensor, token: Tensor) -> tuple[Any, ...]:
        return factor * backward(ctx, grad, token)[0], None, None, None, None

    return patch.object(dispatch._Exchange, "backward", staticmethod(changed))


def unsummed() -> Any:
    replicated = data_axis.replicated
    return patch.object(data_axis, "replicated", lambda *at: replicated(*at[:2], replace(at[2], ranks=1)))


def outputs_changed(change: Callable[[Tensor], Tensor]) -> Any:
    called = dispatch.SpreadLayer.__call__

    def call(layer: Any, rows: Tensor, row_counts: Any) -> tuple[Tensor, Tensor]:
        outputs, token = called(layer, rows, row_counts)
        return change(outputs), token

    return patch.object(dispatch.SpreadLayer, "__call__", call)


def experts_reversed() -> Any:
    compute = dispatch._Stacked.compute

    def other_order(experts: Any, rows: Tensor, row_counts: dispatch.RowCounts) -> Tensor:
        by_rank = row_counts.arriving.view(len(row_counts.there), -1)
        return compute(experts, rows, replace(row_counts, arriving=by_rank.flip(1).flatten()))

    return patch.object(dispatch._Stacked, "compute", other_order)


def idle_called() -> Any:
    tell = dispatch.SpreadLayer.tell
    return patch.object(
        dispatch.SpreadLayer, "tell", lambda layer, counts, like: tell(layer, counts.clamp(min=0), like)
    )


def counted_as_one() -> Any:
    return patch.object(ParallelPlan, "copies", property(lambda plan: {}))


def norm_of_one_rank() -> Any:
    return patch.object(ShardedModel, "holds_all_gradients", property(lambda model: True))


PLANTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "the gradient of the exchange twice": ("top two", lambda: times(2)),
    "no gradient through the exchange": ("top two", lambda: times(0)),
    "gradients of experts are not summed": ("top two", unsummed),
    "a token is dropped": ("mixtral", lambda: outputs_changed(lambda x: torch.cat([x[:-1], 0 * x[-1:]]))),
    "outputs come back in another order": ("mixtral", lambda: outputs_changed(lambda x: x.flip(0))),
    "outputs are 1e-6 too large": ("top two", lambda: outputs_changed(lambda x: x * (1 + 1e-6))),
    "a rank's experts stand in another order": ("mixtral", experts_reversed),
    "an expert without tokens gets a gradient of zeros": ("top two", idle_called),
    "each copy of an expert counts in the norm": ("top two", counted_as_one),
    "the norm is that of one rank": ("mixtral", norm_of_one_rank),
}


@pytest.mark.parametrize(
    "name", ["top two", "one layer", "some choose none", pytest.param("mixtral", marks=pytest.mark.long)]
)
def test_recomputed_and_moved_experts_train_as_one_process(name: str) -> None:
    facts = facts_of((MODELS | MORE_MODELS)[name])

    for strategy in ("dp=4 ep=2 experts=0:0-3", "zero3 ep=4 experts=0:0-3-2"):
        for recompute in RECOMPUTE:
            assert stepped(facts, strategy, recompute=recompute) == StepProof(), (strategy, recompute)


SAMPLE = ("gradients of experts are not summed", "an expert without tokens gets a gradient of zeros")


@pytest.mark.parametrize(
    "bugs", [SAMPLE, pytest.param([bug for bug in PLANTED if bug not in SAMPLE], marks=pytest.mark.long)]
)
def test_a_step_with_spread_experts_finds_each_planted_bug(bugs: Sequence[str]) -> None:
    facts = {name: facts_of(MODELS[name]) for name in {PLANTED[bug][0] for bug in bugs}}

    assert {name: stepped(facts[name], "dp=4 ep=2") for name in facts} == dict.fromkeys(facts, StepProof())
    for bug in bugs:
        name, plant = PLANTED[bug]
        with plant():
            assert stepped(facts[name], "dp=4 ep=2").refusal is not None, bug


MOVES = (
    "ddp",
    "ep=4",
    "ep=4 experts=0:0-2-3+1:1-3",
    "zero3 ep=2",
    "zero1 ep=2 experts=1:0-2",
    "zero3 shard=2 ep=2",
    "zero1 ep=2",
    "zero2",
    "ep=2",
)


@pytest.mark.parametrize("name", ["top two", pytest.param("mixtral", marks=pytest.mark.long)])
def test_predicted_bytes_of_spread_experts_equal_those_of_their_layouts(name: str) -> None:
    facts, plans = facts_of(MODELS[name]), list[ParallelPlan]()
    census = StateBytes(
        facts, {each: {"weight": 8, "state": 4} for each in facts.shapes.whole}, set(facts.shapes.whole)
    )
    for text in MOVES:
        plans.append(make_plan(Strategy.parse(text, 4), facts))
        weights, held = plans[-1].layouts.weights, plans[-1].layouts.held
        for rank, rest in enumerate(census.at_rest(plans[-1].strategy)):
            assert rest.parameters == 8 * sum(layout.numel for layout in weights[rank].values()), (text, rank)
            assert rest.optimizer == 4 * sum(layout.numel for layout in held[rank].values()), (text, rank)
    for old, new in pairwise(plans):
        missing = [
            sum(
                size * (layout.numel - (overlap(before[each], layout) if each in before else 0))
                for size, before, after in (
                    (8, old.layouts.weights[rank], new.layouts.weights[rank]),
                    (4, old.layouts.held[rank], new.layouts.held[rank]),
                )
                for each, layout in after.items()
            )
            for rank in range(4)
        ]
        assert list(census.flow(old.strategy, new.strategy).received) == missing, (str(old.strategy), str(new.strategy))


PRODUCTS = ("ep=4", "zero3 ep=2", "dp=2 tp=2 ep=2", "dp=2 pp=2 ep=2", "dp=2 cp=2 ep=2")


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2 moe"])
def test_spread_experts_work_with_every_other_axis(name: str) -> None:
    for strategy in PRODUCTS:
        checked = nbkit.check(MODELS[name], strategy, stacked(), 4, loss=loss)
        assert checked.ok and "compared" not in str(checked), str(checked)


class Twice(Experts):
    """A mixture that calls an expert twice, for two halves of its tokens."""

    def routed(self, scores: Tensor) -> Any:
        for token, weights, expert in super().routed(scores):
            half = len(token) // 2
            yield token[:half], weights[:half], expert
            yield token[half:], weights[half:], expert


class Checkpointed(Language):
    """A model that recomputes its layers itself."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def test_experts_that_cannot_be_spread_are_refused_with_the_reason() -> None:
    def refusal(build: Callable[[], nn.Module], strategy: str) -> str:
        return str(nbkit.check(build, strategy, stacked(), 4, loss=loss))

    assert "has modules that are not called with tokens alone" in refusal(MODELS["dense"], "ep=4")
    assert "has no module whose weights are stacked" in refusal(lambda: nn.Embedding(VOCAB, VOCAB).double(), "ep=2")
    assert "ep 4, 3 experts in a layer" in refusal(lambda: Language(lambda: Experts(3)), "ep=4")
    assert "it calls an expert twice" in refusal(lambda: Language(Twice), "ep=2")
    assert "layer 1, expert 6; the model has 6 experts" in refusal(Language, "ep=2 experts=0:1-5+1:2-6")
    assert "compute=nbkit.Compute(recompute=True) does the same" in refusal(Checkpointed, "ep=2")


class Indexed(nn.Module):
    """Stacked experts that use numbers as indices, so one process counts a negative number from the last expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("tw,tkwv,tk->tv", tokens, self.weight[chosen], weights)


class RoutesToIndexed(nn.Module):
    negative = False

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Indexed()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, chosen - 4 if self.negative else chosen, weights).view_as(x)


def negative_later(world: Any) -> str:
    trainer = made(lambda: Language(RoutesToIndexed, 1), "ep=2")
    trainer.fit(1)
    trainer.model.layers[0].negative = dist.get_rank() == 0  # type: ignore[index, union-attr]
    return said(lambda: trainer.fit(1))


@pytest.mark.usefixtures("known_to_be_right")
def test_a_negative_expert_number_is_refused_on_all_ranks() -> None:
    for text in run_ranks(negative_later, 2):
        assert text.startswith("The router of 'layers.0.experts' chose an expert with a negative number.")
        assert "the experts have the numbers 0 to 3" in text


def in_bf16(world: Any) -> dict[str, list[float]]:
    # The second rank has no row of the last batch of each epoch.
    asked: dict[str, Any] = {"precision": "bf16", "data": rows(2 * BATCH + 1)}
    return {
        strategy: [record["loss"] for record in made(lambda: mixtral().float(), strategy, **asked).fit(2 * EPOCH)]
        for strategy in ("ddp", "ep=2", "zero3 ep=2")
    }


@pytest.mark.long
def test_spread_experts_in_bf16_train_as_whole_ones_with_an_empty_rank_too() -> None:
    found = run_ranks(in_bf16, 2, timeout=170)[0]

    for strategy in ("ep=2", "zero3 ep=2"):
        assert found[strategy] == pytest.approx(found["ddp"], rel=1e-2), strategy
