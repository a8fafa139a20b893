"""Test `labels=` of transformers: every strategy computes the mean over the kept labels as one process does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.loss.counted_targets import CountedTargets, Share
from nbkit.rank.loss.row_weights import weigh
from nbkit.rank.train.config import TrainConfig
from nbkit.rank.train.trainer import Trainer

VOCAB, LENGTH, ROWS, BATCH, STEPS = 96, 16, 24, 8, 3
INPUTS = ["input_ids", "labels"]
Rows = list[dict[str, Tensor]]


def sizes(**changed: Any) -> dict[str, Any]:
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return common | {"num_attention_heads": 4, "max_position_embeddings": LENGTH} | changed


def in_double(model: nn.Module) -> nn.Module:
    """Convert `model` to float64, with the loss of transformers' causal models but not its cast to float32."""

    def shifted(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model.loss_function = shifted  # type: ignore[assignment]
    return model.double()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    changed = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    return in_double(LlamaForCausalLM(LlamaConfig(**sizes(**changed))))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    quiet |= {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **quiet)
    return in_double(GPT2LMHeadModel(config))


def mixtral() -> nn.Module:
    """Return a Mixtral as transformers builds it, in float32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    changed = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes(num_key_value_heads=2, **changed)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes(**quiet))).double()


def answers() -> Rows:
    """Return rows that learn only the answer after a question. The first two questions are equally long."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=draw)
    questions = torch.randint(2, LENGTH - 2, (ROWS, 1), generator=draw)
    questions[:2] = 6
    # Row 4 has nothing to learn. Nor have rows 10 and 11, the only rows that one rank has of their batch.
    questions[4] = questions[10:12] = LENGTH
    labels = ids.masked_fill(torch.arange(LENGTH) < questions, -100)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def gaps() -> Rows:
    """Return rows in which about one token in seven is hidden and must be predicted. Rows 10 and 11 hide none."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=draw)
    hidden = torch.rand(ids.shape, generator=draw) < 0.15
    hidden[10:12] = False
    return [
        {"input_ids": a.masked_fill(gap, 0), "labels": a.masked_fill(~gap, -100)}
        for a, gap in zip(ids, hidden, strict=True)
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Rows]]] = {
    "llama": (llama, answers),
    "gpt2": (gpt2, answers),
    "mixtral": (mixtral, answers),
    "bert": (bert, gaps),
}

# The loss of a model counts the targets, and the strategy divides them; make zoo has all pairs.
PAIRS = {"gpt2": "dp=2 pp=2", "bert": "zero3"}
ALSO = {"llama": "dp=2 tp=2", "mixtral": "ddp"}

# strategy -> other arguments of the Trainer
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"compute": nbkit.Compute(microbatch_size=1)},
    "dp=2 pp=2": {},
    "dp=2 tp=2": {"compute": nbkit.Compute(microbatch_size=2)},
}


def inside(output: Any, _: Any) -> Tensor:
    found: Tensor = output.loss
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_process(build: Callable[[], nn.Module], data: Rows) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build().train()
    optimizer, losses = sgd(model), []
    for batch in list(DataLoader(data, batch_size=BATCH))[:STEPS]:  # type: ignore[arg-type]
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(world: Any, pairs: dict[str, str]) -> dict[tuple[str, str], float]:
    """Return {(model, strategy): the largest difference of a loss or a weight from one process}."""
    found: dict[tuple[str, str], float] = {}
    for name, strategy in pairs.items():
        build, rows = MODELS[name]
        data = rows()
        losses, weights = one_process(build, data)
        asked: dict[str, Any] = {"model": build, "optimizer": sgd, "loss": inside, "inputs": INPUTS, "log_dir": None}
        asked_too = asked | STRATEGIES[strategy]
        trainer = Trainer(
            data=data,
            batch_size=BATCH,
            loading=nbkit.Loading(shuffle=False),
            strategy=strategy,
            progress=False,
            **asked_too,
        )
        made = [record["loss"] for record in trainer.fit(STEPS)]
        state = trainer.full_state_dict()
        apart = [float((state[key] - weight).abs().max()) for key, weight in weights.items()]
        found[name, strategy] = max(*apart, *(abs(a - b) for a, b in zip(made, losses, strict=True)))
        if name == "gpt2":
            job = nbkit.prepare(build, sgd, loss=inside, inputs=INPUTS, strategy="zero3", log_dir=None)
            for batch in job.batches(DataLoader(data, batch_size=BATCH)):  # type: ignore[arg-type]
                loss = float(job.backward(batch).loss)
                job.optimizer.step()
                job.optimizer.zero_grad()
                found["looped", str(job.step)] = abs(loss - losses[job.step - 1])
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("pairs", [PAIRS, pytest.param(ALSO, marks=pytest.mark.long)])
def test_unequal_numbers_of_labels_train_as_in_one_process(
    pairs: dict[str, str],
) -> None:
    found = run_ranks(trained, 4, pairs, timeout=240)[0]

    # Llama's norms compute in float32, whatever its weights are; Mixtral is in float32.
    bars = {"mixtral": 2e-6, "llama": 1e-8}
    assert {key: away for key, away in found.items() if not away < bars.get(key[0], 1e-10)} == {}
    assert len(found) == len(pairs) + STEPS * ("gpt2" in pairs)


def averaged(compute: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> list[Tensor]:
    """Return the weighted mean loss of two parts of a batch, and its gradients."""
    parts = [(logits[:3].detach().requires_grad_(), target[:3]), (logits[3:].detach().requires_grad_(), target[3:])]
    weighed = []
    for part in parts:
        with CountedTargets() as targets:
            weighed.append(weigh(compute(*part), len(part[1]), targets))
    whole = sum(each.total for each in weighed) / sum(each.weight for each in weighed)
    return [whole, *torch.autograd.grad(whole, [part for part, _ in parts])]  # type: ignore[arg-type, list-item]


CLASSES = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)


@pytest.mark.parametrize(
    "compute",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda x, y: F.cross_entropy(x, y, CLASSES, label_smoothing=0.2),
        lambda x, y: F.nll_loss(x.log_softmax(1), y, weight=CLASSES),
        lambda x, y: F.cross_entropy(x, F.one_hot(y.clamp(min=0), 4).double() * 0.9, weight=CLASSES),
    ],
)
@pytest.mark.parametrize("kept", [7, 3, 2])
def test_two_parts_average_to_the_whole_whatever_labels_each_keeps(compute: Any, kept: int) -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 4, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    target = torch.randint(4, (7, 5), generator=draw)
    target[kept:] = -100
    target[0, 0] = -100
    if "one_hot" in getattr(getattr(compute, "__code__", None), "co_names", ()):
        logits, target = logits[..., 0], target[..., 0]
    expected = compute(logits, target)
    one, *grads = averaged(compute, logits, target)

    assert float((one - expected).detach().abs()) < 1e-12
    (grad,) = torch.autograd.grad(expected, [logits])
    assert float((torch.cat(grads) - grad).abs().max()) < 1e-12


def test_a_mean_over_nothing_is_zero_and_float16_does_not_overflow() -> None:
    for smoothing in (0.0, 0.1):
        logits = torch.randn(4, 3, requires_grad=True)
        with CountedTargets() as targets:
            loss = F.cross_entropy(logits, torch.full((4,), -100), label_smoothing=smoothing)
        loss.backward()
        assert float(loss) == 0 and targets.weight == 0 and logits.grad is not None and not logits.grad.any()
    logits = torch.zeros(40_000, 8, dtype=torch.float16)
    with CountedTargets():
        loss = F.cross_entropy(logits, torch.zeros(40_000, dtype=torch.long))
    assert loss.dtype == torch.float16 and abs(float(loss) - math.log(8)) < 1e-3


def test_loss_functions_are_replaced_in_the_thread_of_the_model_and_restored() -> None:
    plain, outer, inner, other = F.cross_entropy, CountedTargets(), CountedTargets(), []
    target = torch.tensor([0, -100, 2])

    def elsewhere() -> None:
        other.append(float(F.cross_entropy(torch.zeros(3, 3), torch.full((3,), -100))))

    with outer.inside():
        nn.CrossEntropyLoss()(torch.zeros(3, 3), target)
        with inner.inside():
            F.nll_loss(torch.zeros(3, 3), target)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert F.cross_entropy is not plain

    assert F.cross_entropy is plain and outer.weight == inner.weight == 2
    assert other[0] != other[0] and len(outer.weights) == len(inner.weights) == 1


def test_cross_entropies_over_unequal_targets_have_no_weight() -> None:
    with CountedTargets() as targets:
        for count in (5, 4):
            F.cross_entropy(torch.zeros(count, 3), torch.zeros(count, dtype=torch.long))

    with pytest.raises(TrainingError, match="do not count the same targets"):
        _ = targets.weight
    # The count is for the labels of the batch. A loss of other targets must not be divided by it.
    share = Share((5.0, 3.0), (10.0, 8.0), 0.5)
    with CountedTargets(share), pytest.raises(TrainingError, match="no longer takes its targets"):
        for count in (5, 4):
            F.cross_entropy(torch.zeros(count, 3), torch.zeros(count, dtype=torch.long))
    with pytest.raises(TrainingError, match="no mean cross entropy"):
        CountedTargets().check()


def test_a_number_of_items_of_a_whole_batch_is_refused() -> None:
    class Counting(nn.Module):
        """A model that divides its loss by a given number of targets, as models of transformers do."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(VOCAB, VOCAB).double()

        def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
            count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            logits = self.inner(input_ids)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count}

    batch: Any = {key: torch.stack([row[key] for row in answers()]) for key in INPUTS}
    with pytest.raises(TrainingError, match="counts targets of the whole batch") as raised:
        nbkit.check(Counting(), "ddp", batch, 2, inputs=[*INPUTS, "num_items_in_batch"])
    with pytest.raises(TrainingError, match="counts targets of the whole batch"):
        TrainConfig(loss=inside, inputs=[*INPUTS, "num_items_in_batch"])
    assert "leave it out of inputs=" in raised.value.hint
    said = nbkit.check(Counting(), "ddp", batch, 2, inputs=INPUTS, loss=lambda output, _: output["loss"])
    assert not said.ok and "no mean over rows" in str(said)
