"""`labels=` of transformers: its mean over what the labels keep is refused, with a line that trains as it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F  # of the line to type
from torch.utils.data import DataLoader

import nbkit
from nbkit.errors import StrategyError
from nbkit.rank.train.trainer import Trainer

VOCAB, LENGTH, BATCH, STEPS = 96, 16, 8, 3
INPUTS = ["input_ids", "labels"]


def sizes(**changed: Any) -> dict[str, Any]:
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return common | {"num_attention_heads": 4, "max_position_embeddings": LENGTH} | changed


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes(use_cache=False, bos_token_id=None, eos_token_id=None)))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    changed = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes(num_key_value_heads=2, **changed)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes(**quiet)))


def answers() -> list[dict[str, Tensor]]:
    """Only what follows a question of some length is learned; the first two questions are equally long."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (32, LENGTH), generator=draw)
    questions = torch.randint(2, LENGTH - 2, (32, 1), generator=draw)
    questions[:2] = 6
    labels = ids.masked_fill(torch.arange(LENGTH) < questions, -100)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def gaps() -> list[dict[str, Tensor]]:
    """One token in seven is to be found; in some rows none is."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (32, LENGTH), generator=draw)
    hidden = torch.rand(ids.shape, generator=draw) < 0.15
    return [
        {"input_ids": a.masked_fill(gap, 0), "labels": a.masked_fill(~gap, -100)}
        for a, gap in zip(ids, hidden, strict=True)
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Tensor]]]]] = {
    "llama": (llama, answers),
    "mixtral": (mixtral, answers),
    "bert": (bert, gaps),
}


def inside(output: Any, _: Any) -> Tensor:
    found: Tensor = output.loss
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_process(build: Callable[[], nn.Module], data: list[dict[str, Tensor]]) -> list[float]:
    torch.manual_seed(0)
    model = build().train()
    optimizer, losses = sgd(model), []
    for batch in list(DataLoader(data, batch_size=BATCH))[:STEPS]:  # type: ignore[arg-type]
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(world: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (build, rows) in MODELS.items():
        data, losses = rows(), one_process(build, rows())
        asked: dict[str, Any] = {"model": build, "optimizer": sgd, "data": data, "batch_size": BATCH, "shuffle": False}
        asked |= {"log_dir": None, "progress": False}
        with pytest.raises(StrategyError) as raised:
            Trainer(loss=inside, inputs=INPUTS, **asked)
        with pytest.raises(StrategyError) as looped:
            job = nbkit.prepare(build, sgd, loss=inside, inputs=INPUTS, strategy="zero3", log_dir=None)
            for batch in job.batches(DataLoader(data, batch_size=BATCH)):  # type: ignore[arg-type]
                job.backward(batch)
        said = str(raised.value)
        line = said[said.index("loss=") + len("loss=") : said.index("   (")]
        found[name] = {"said": said, "looped": str(looped.value)}
        for strategy, changed in (("ddp", {}), ("zero3", {"microbatch_size": 2})):
            trainer = Trainer(loss=eval(line), inputs=INPUTS[:1], strategy=strategy, **asked, **changed)
            pairs = zip(trainer.fit(STEPS), losses, strict=True)
            found[name][strategy] = max(abs(record["loss"] - other) for record, other in pairs)
    return found


def test_the_line_that_the_refusal_gives_trains_as_the_labels_do_on_one_process() -> None:
    assert F is not None
    found = run_ranks(trained, 2, timeout=240)[0]

    for name, seen in found.items():
        assert "no mean over rows" in seen["said"] and "no mean over rows" in seen["looped"], name
        assert ("[:, 1:]" in seen["said"]) == (name != "bert")
        assert seen["ddp"] < 2e-6 and seen["zero3"] < 2e-6, (name, seen)
