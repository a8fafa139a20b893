"""Train a case twice: on ranks with the Trainer, and in one process with a loop in plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

import nbkit
from nbkit.errors import NbkitError
from nbkit.rank.data.batch import call
from nbkit.rank.parallel.check_model import check
from nbkit.rank.rng.keyed_dropout import KeyedDropout
from nbkit.rank.train.job import prepare
from nbkit.rank.train.trainer import Trainer
from nbkit.tensor_layout import Layout
from verify.cases import LONGEST, Case, zoo_ranks
from verify.models.by_hand import BY_HAND, AuxiliaryLoss, with_auxiliary
from verify.models.images import IMAGES
from verify.models.specimens import (
    ZOO,
    Specimen,
    cross_entropy,
    gpt_frozen,
    gpt_no_key_bias,
    hf_llama,
    lora,
    next_tokens,
    object_cross_entropy,
)
from verify.models.transformers import TRANSFORMERS
from verify.optimizers import OPTIMIZERS

ARCHITECTURES: dict[str, Specimen] = {**BY_HAND, **IMAGES, **TRANSFORMERS}
"""The models of `make zoo`."""
FINE_TUNED: dict[str, Specimen] = {
    "gpt_frozen": Specimen(gpt_frozen, next_tokens, cross_entropy),
    "gpt_no_key_bias": Specimen(gpt_no_key_bias, next_tokens, cross_entropy),
    "llama_lora": Specimen(
        lambda: lora(hf_llama(2), ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
        next_tokens,
        object_cross_entropy,
    ),
}
"""Models with frozen parameters, and with adapters."""
AUXILIARY = {"moe_auxiliary": Specimen(AuxiliaryLoss, next_tokens, with_auxiliary)}
MODELS: dict[str, Specimen] = {**ZOO, **ARCHITECTURES, **FINE_TUNED, **AUXILIARY}

SEED, BATCH, RAGGED, CLIP, DROP = 5, 16, 3, 0.1, 0.1
LR, ZOO_BATCH, ZOO_LR = 3e-4, 8, 0.05

Pieces = Mapping[str, tuple[Tensor, Layout]]


@dataclass(frozen=True)
class Truth:
    """The results of one process.

    grads: of the first step, before clipping, by original name. states: number of steps -> state of the model then: at
    the start and the end, and with SGD after each step. rounds: the model rounds to float32 in its forward; this is
    looked for with SGD only. checks: strategy -> ("fits" | "refused" | "crash", text), as `nbkit.check` says.
    evaluated: the loss of all data at the end, if the case evaluates.
    """

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    rounds: bool = False
    checks: dict[str, tuple[str, str]] = field(default_factory=dict)
    evaluated: tuple[float, ...] = ()


@dataclass
class Outcome:
    """The results of one rank.

    made: number of steps. grads: its pieces of the gradients of the first step. state: of the whole model at the end.
    refused: strategy -> why. late: a refusal after the first step, which ended the training. evaluated: see Truth.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: Pieces = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    made: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    late: str = ""
    evaluated: tuple[float, ...] = ()


def _specimen(case: Case) -> Specimen:
    return MODELS[case.model] if isinstance(case.model, str) else case.model


def _items(case: Case) -> list[tuple[Any, Any]]:
    if "sgd" in case.extras:
        num = ZOO_BATCH * LONGEST
    else:
        num = BATCH + RAGGED if "ragged" in case.extras else 4 * BATCH
    return _specimen(case).rows(num, dtype=getattr(torch, case.dtype), padded="mask" in case.extras)


def _build(case: Case) -> nn.Module:
    dtype = getattr(torch, case.dtype)
    settings: dict[str, Any] = {} if case.layers is None else {"layers": case.layers}
    if "dropout" in case.extras:
        settings["dropout"] = DROP
    model = _specimen(case).build(dtype, **settings)
    return (model if dtype == torch.float64 else _smooth(model)).train()


def _smooth(model: nn.Module) -> nn.Module:
    """Replace ReLU by GELU, in place.

    A number near the kink of a ReLU can be above it in one order of sums and below it in another. In float32, two runs
    of one process with differently cut batches differ by 4.6e-3 after 50 steps of the encoder.
    """
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation, part.activation_relu_or_gelu = F.gelu, 2
        for name, child in part.named_children():
            if isinstance(child, nn.ReLU):
                setattr(part, name, nn.GELU())
    return model


def _optimizer(case: Case) -> Any:
    if case.optimizer:
        return OPTIMIZERS[case.optimizer]
    if "sgd" in case.extras:
        return lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], ZOO_LR, momentum=0.9)
    return lambda model: torch.optim.AdamW(model.parameters(), lr=LR)


def _loss(case: Case, model: nn.Module | None = None) -> Any:
    """Return the loss of `case`. model: the one that is trained, if it exists already."""
    specimen = _specimen(case)
    if specimen.loss_of is not None and model is not None:
        return specimen.loss_of(model)
    return weighted if "mask" in case.extras else specimen.loss


def weighted(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum, weight). Padding and two of five classes do not count, so the rows have different weights."""
    logits = getattr(output, "logits", output)
    keep = (target >= 0) & (target % 5 > 1)
    losses = F.cross_entropy(logits.flatten(0, -2), target.clamp(min=0).flatten(), reduction="none")
    return (losses * keep.flatten()).sum(), keep.sum()


def train(case: Case) -> Outcome:
    """Train `case` with nbkit, on all ranks of the world. Collective. Raises all errors except refusals."""
    found, trainer = Outcome(), None
    with warnings.catch_warnings():
        if "sgd" in case.extras:
            warnings.simplefilter("ignore")
        try:
            trainer = trainer_of(case)
            _note_gradients(trainer, found)
            for strategy in case.strategies[1:]:
                trainer.fit(1)
                try:
                    trainer.switch(strategy)
                except NbkitError as error:
                    found.refused[strategy] = str(error)
            trainer.fit(until=case.steps)
        except NbkitError as error:
            if trainer is None or not trainer.step:
                found.refused[case.strategies[0]] = str(error)
                return found
            found.late = str(error)
        found.made = trainer.step
        if not found.late:
            found.losses = [record["loss"] for record in trainer.history]
            found.norms = [record["grad_norm"] for record in trainer.history]
            found.state = trainer.full_state_dict()
            if "evaluate" in case.extras:
                found.evaluated = (trainer.evaluate(_items(case)),)
    return found


def trainer_of(case: Case, **changed: Any) -> Trainer:
    """Return the trainer of `case` under its first strategy."""
    model = None if _specimen(case).loss_of is None else _build(case)
    asked: dict[str, Any] = {
        "model": (lambda: _build(case)) if model is None else model,
        "loss": _loss(case, model),
        "optimizer": _optimizer(case),
        "data": _items(case),
        "batch_size": ZOO_BATCH if "sgd" in case.extras else BATCH,
        "loading": nbkit.Loading(shuffle="sgd" not in case.extras),
        "strategy": case.strategies[0],
        "hints": nbkit.ModelHints(stages=[f"convs.{i}" for i in range(2, 10, 2)] if "pp=5" in case.strategy else None),
        "seed": SEED,
        "precision": "bf16" if "bf16" in case.extras else None,
        "clip_norm": CLIP if "clip" in case.extras else None,
        "compute": nbkit.Compute(
            microbatch_size=2 if "accumulate" in case.extras else None,
            recompute="selective" if "selective" in case.extras else "recompute" in case.extras,
            grad_norm_every=1,
        ),
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))


def _note_gradients(trainer: Trainer, found: Outcome) -> None:
    job = trainer.job
    backward = job.backward

    def noted(batch: Any) -> Any:
        result = backward(batch)
        if not found.grads:
            held = job.sharded_model.held.items()
            found.grads = {n: (_grad(p), job.sharded_model.layouts[n]) for n, p in held if p.requires_grad}
        return result

    job.backward = noted  # type: ignore[method-assign]


def _grad(param: Tensor) -> Tensor:
    return torch.zeros_like(param).detach() if param.grad is None else param.grad.clone()


def train_by_hand(case: Case) -> list[float]:
    """Train `case` in a loop with `nbkit.prepare`, and return the losses. Collective."""
    data = _items(case)
    batches = [default_collate([data[i] for i in chosen]) for chosen in _chosen(case, len(data))]
    job = prepare(
        lambda: _build(case),
        _optimizer(case),
        loss=_loss(case),
        strategy=case.strategy,
        seed=SEED,
        hints=nbkit.ModelHints(example=batches[0]),
    )
    for batch in job.batches(batches):
        job.backward(batch)
        if "clip" in case.extras:
            job.clip(CLIP)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [record["loss"] for record in job.history]


def _chosen(case: Case, num: int) -> Iterator[list[int]]:
    """Yield the samples, of `num`, in the batch of each step: in the pinned order, with SGD in their own order."""
    size = ZOO_BATCH if "sgd" in case.extras else BATCH
    epoch = at = 0
    for _ in range(case.steps):
        draw = torch.Generator().manual_seed(SEED + epoch)
        order = list(range(num)) if "sgd" in case.extras else torch.randperm(num, generator=draw).tolist()
        yield order[at : at + size]
        at += size
        if at >= num:
            epoch, at = epoch + 1, 0


def truth(case: Case, *, rows: int = BATCH, wrap: Any = nullcontext, device: str = "cpu") -> Truth:
    """Train `case` in plain torch, in this process. rows: per forward. wrap: makes a context around each pass."""
    model, data = _build(case).to(device), _items(case)
    made, loss_of, casts = _optimizer(case)(model), _loss(case, model), _Casts()
    optimizers = made if isinstance(made, list) else [made]
    keyed = KeyedDropout(model, SEED) if "dropout" in case.extras else None
    losses: list[float] = []
    norms: list[float] = []
    grads: dict[str, Tensor] = {}
    states = {0: _state(model)}
    for chosen in _chosen(case, len(data)):
        loss = torch.zeros((), dtype=torch.float64)
        total = torch.zeros(())
        for first in range(0, len(chosen), rows):
            part = chosen[first : first + rows]
            value, target = tree_map_only(Tensor, lambda one: one.to(device), default_collate([data[i] for i in part]))
            drop = nullcontext() if keyed is None else keyed.step(len(losses), range(first, first + len(part)))
            cast = torch.autocast(device, torch.bfloat16, enabled="bf16" in case.extras)
            with drop, cast, wrap(), casts if "sgd" in case.extras else nullcontext():
                output = call(model, value)
                if "mask" in case.extras:
                    share, weight = loss_of(output, target)
                else:
                    share, weight = loss_of(output, target) * (len(part) / len(chosen)), torch.zeros(())
                share.backward()
            loss, total = loss + share.detach().cpu(), total + weight.cpu()
        if "mask" in case.extras:
            loss = loss / total
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= total.to(device)
        own = [p.grad for p in model.parameters() if p.grad is not None]
        grads = grads or {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm([g.double() for g in own])
        if "clip" in case.extras:
            torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), CLIP, norm)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(float(loss))
        norms.append(float(norm))
        if "sgd" in case.extras or len(losses) == case.steps:
            states[len(losses)] = _state(model)
    evaluated: tuple[float, ...] = ()
    if "evaluate" in case.extras:
        value, target = default_collate(data)
        with torch.no_grad():
            evaluated = (float(loss_of(call(model.eval(), value), target)),)
    return Truth(losses, norms, grads, states, casts.seen, evaluated=evaluated)


class _Casts(TorchDispatchMode):
    """Sets `seen` if a tensor is rounded from double to single precision."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64 and args[0].numel() > 1:
            self.seen |= result.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return result


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def checked(case: Case, strategy: str) -> tuple[str, str]:
    """Return the answer of `nbkit.check` for the case's model under `strategy`; see Truth."""
    batch = default_collate(_items(case)[:ZOO_BATCH])
    try:
        told = check(_build(case), strategy, batch, zoo_ranks(strategy), loss=_loss(case))
    except NbkitError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return ("fits", "") if told.ok else ("refused", "; ".join(str(each) for each in told.findings if each.error))
