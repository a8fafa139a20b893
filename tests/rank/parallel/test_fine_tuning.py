"""Fine-tuning: frozen parameters and peft's adapters, under every family of strategies, equal to one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_zoo import ZOO, exact, hf_gpt2, hf_llama, next_tokens, object_cross_entropy
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.rank.train.trainer import Trainer

ROWS, STEPS = 8, 2
# Every axis but cp with parameters that are frozen whole, or with adapters.
CASES = [
    ("frozen", ("dp=2 pp=2 schedule=zbv",)),
    ("lora gpt2", ("tp=2 pp=2",)),
]
REST = [("frozen", ("cp=2 tp=2", "zero1")), ("lora llama", ("zero=3 dp=2 tp=2", "dp=2 pp=2"))]


def frozen() -> nn.Module:
    """The embedding and the first half of the blocks are frozen, as is every bias behind them."""
    model = ZOO["gpt"].build(torch.float64)
    for name, p in model.named_parameters():
        p.requires_grad_(not (name.startswith(("tokens", "blocks.0", "blocks.1")) or name.endswith("bias")))
    return model


def lora(model: nn.Module, targets: list[str]) -> nn.Module:
    """Under peft's adapters, none of which is zero."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        wrapped: Any = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=targets))
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
    return exact(wrapped.double()).train()


def _llama() -> nn.Module:
    torch.manual_seed(0)
    return lora(hf_llama(2), ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])


def _gpt2() -> nn.Module:
    torch.manual_seed(0)
    return lora(hf_gpt2(2), ["c_attn", "c_proj"])


MODELS: dict[str, Callable[[], nn.Module]] = {"frozen": frozen, "lora llama": _llama, "lora gpt2": _gpt2}


def loss(output: Any, target: Tensor) -> Tensor:
    return ZOO["gpt"].loss(output, target) if isinstance(output, Tensor) else object_cross_entropy(output, target)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """What trains, in two groups: with weight decay and without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    split = [[p for p in trained if (p.ndim > 1) == wide] for wide in (True, False)]
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(split, (0.1, 0.0), strict=True) if params],
        lr=1e-2,
    )


def items(name: str) -> list[Any]:
    ids, target = next_tokens(ROWS, torch.Generator().manual_seed(4))
    if name == "frozen":
        return list(zip(ids, target, strict=True))
    return [({"input_ids": x}, y) for x, y in zip(ids, target, strict=True)]


def one_process(name: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, gradient norms, weights afterwards) of plain torch over whole batches."""
    model = MODELS[name]()
    optimizer = groups(model)
    rows = items(name)
    value: Any = (
        torch.stack([x for x, _ in rows]) if name == "frozen" else torch.stack([x["input_ids"] for x, _ in rows])
    )
    target, losses, norms = torch.stack([y for _, y in rows]), [], []
    for _ in range(STEPS):
        output = model(value) if name == "frozen" else model(input_ids=value)
        found = loss(output, target)
        optimizer.zero_grad()
        found.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(found.item())
    return losses, norms, {key: p.detach() for key, p in model.named_parameters()}


def tuned(world: Any, cases: list[tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategies in cases:
        losses, norms, weights = one_process(name)
        for strategy in strategies:
            trainer = Trainer(
                model=MODELS[name],
                loss=loss,
                optimizer=groups,
                data=items(name),
                batch_size=ROWS,
                strategy=strategy,
                loading=nbkit.Loading(shuffle=False),
                clip_norm=0.5,
                log_dir=None,
                progress=False,
            )
            trainer.fit(STEPS)
            history = trainer.history
            wrong = max(abs(r["loss"] - other) for r, other in zip(history, losses, strict=True))
            wrong = max(wrong, *(abs(r["grad_norm"] - other) for r, other in zip(history, norms, strict=True)))
            sharded_model = trainer.job.sharded_model
            for key, (tensor, layout) in sharded_model.data.weights.items():
                for here, there in layout.pieces:
                    part = tensor.detach()[here.slices] - weights[key][there.slices]
                    wrong = max(wrong, float(part.abs().max()) if part.numel() else 0.0)
            frozen_state = sum(not p.requires_grad for p in trainer.optimizer.state)
            found[name, strategy] = (wrong, frozen_state)
    return found


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("cases", [CASES, pytest.param(REST, marks=pytest.mark.long)])
def test_frozen_parameters_and_adapters_train_as_in_one_process(cases: list[tuple[str, tuple[str, ...]]]) -> None:
    for found in run_ranks(tuned, 4, cases, timeout=170):
        assert {key: result for key, result in found.items() if not result[0] <= 1e-10 or result[1]} == {}
