"""Test that losses that a strategy would change are refused before the first step, with a line that fixes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

import nbkit
from nbkit.errors import NbkitError
from nbkit.rank.data.sample_rows import Sample
from nbkit.rank.loss.loss_check import examine

VOCAB, LENGTH, ROWS, BATCH = 40, 12, 48, 8
Row = tuple[Tensor, Tensor]


def texts(*, masked: bool = True) -> list[Row]:
    """Return ids and labels. masked: the first two rows ignore equally many labels, the others do not."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=draw)
    lengths = torch.randint(3, LENGTH, (ROWS,), generator=draw)
    lengths[:2] = 7
    labels = ids.masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
    return list(zip(ids, labels if masked else ids, strict=True))


def padded() -> list[Row]:
    """Return rows whose targets end with zeros."""
    return [(ids, labels.clamp(min=0)) for ids, labels in texts()]


def labelled() -> list[Row]:
    """Return points of seven classes. The first two are of class 3."""
    draw = torch.Generator().manual_seed(5)
    points = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
    classes = torch.randint(7, (ROWS,), generator=draw)
    classes[:2] = 3
    return list(zip(points, classes, strict=True))


def ragged() -> list[Row]:
    """Return series of unequal lengths. The collator pads each to the longest in its batch."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (ROWS,), generator=draw).tolist()
    series = [torch.randn(length, 6, generator=draw, dtype=torch.float64) for length in lengths]
    return [(one, one.sum(1)) for one in series]


def pad(rows: list[Row]) -> list[Tensor]:
    return [pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True)]


def counted(rows: list[Row]) -> dict[str, Tensor]:
    """Return a batch with the number of its targets, as collators for language models do."""
    ids, labels = (torch.stack(list(part)) for part in zip(*rows, strict=True))
    return {"ids": ids, "labels": labels, "num": (labels != -100).sum()}


class Words(nn.Module):
    """A model that predicts from each token alone. zero: its head is zero, so all tokens have the same loss."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(ids))))


class Inside(nn.Module):
    """A model that returns its loss, as with labels= of transformers. kind: the kind of its loss."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.words, self.kind = Words(), kind

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.words(ids)
        loss = by_hand(logits, labels) if self.kind == "by hand" else tokens(logits, labels)
        balance = logits.softmax(-1).mean((0, 1)).square().sum()
        if self.kind == "unnamed":
            return loss + 0.01 * balance
        if self.kind == "noted":
            self.balance = balance
            return {"loss": loss, "logits": logits}
        return {"loss": loss, "logits": logits, "aux_loss": balance}


class Pretraining(nn.Module):
    """A model with the two losses of BERT's pretraining: hidden words, and the kind of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = Words(), nn.Linear(VOCAB, 2).double()

    def forward(self, ids: Tensor, labels: Tensor, kind: Tensor) -> Any:
        logits = self.words(ids)
        summary = self.kinds(logits[:, 0])
        return {"loss": tokens(logits, labels) + 0.5 * F.cross_entropy(summary, kind), "logits": logits}


def points_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7)).double()


def series_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(-2)).double()


def tokens(output: Tensor, target: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **how)


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over targets that are not ignored, without torch's ignore_index."""
    return tokens(output, target, reduction="sum") / (target != -100).sum()


def focal(output: Tensor, target: Tensor) -> Tensor:
    hit = F.one_hot(target, 7).to(output)
    lost = F.binary_cross_entropy_with_logits(output, hit, reduction="none")
    return ((output.sigmoid() - hit) ** 2 * lost).sum() / (target > 2).sum()


def ctc(output: Tensor, target: Tensor) -> Tensor:
    lengths = (target > 0).sum(1)
    frames = torch.full((len(target),), LENGTH)
    logs = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, target, frames, lengths, reduction="sum", zero_infinity=True) / lengths.sum()


def noted(model: Inside) -> Callable[[Any, Any], Tensor]:
    return lambda output, _: output["loss"] + 0.01 * model.balance


WEIGHTS = torch.arange(1.0, 8.0, dtype=torch.float64)
PADDED = nbkit.Loading(shuffle=False, collate=pad)
SEVEN: dict[str, Any] = {"model": points_net, "data": labelled()}
WITH_LABELS: dict[str, Any] = {
    "model": Inside,
    "data": [{"ids": ids, "labels": labels} for ids, labels in texts()],
    "inputs": ["ids", "labels"],
}
WITH_KINDS: dict[str, Any] = {
    "data": [{"ids": ids, "labels": labels, "kind": ids[0] % 2} for ids, labels in texts()],
    "inputs": ["ids", "labels", "kind"],
}
PLAIN_LABELS = {**WITH_LABELS, "data": [{"ids": ids, "labels": ids} for ids, _ in texts()]}

# name -> (arguments of the Trainer, words of the message)
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ignored labels": ({"loss": by_hand}, ["no mean over rows", "(target != -100).sum()", "dp=2 computes parts"]),
    "a head of zeros": ({"model": lambda: Words(zero=True), "loss": by_hand}, ["(target != -100).sum()"]),
    "a sum": ({"loss": lambda o, t: F.cross_entropy(o, t, reduction="sum"), **SEVEN}, ["loss.sum(), len(target)"]),
    "focal loss by its positives": ({"loss": focal, **SEVEN}, ["mask.sum()"]),
    "ctc by its letters": ({"loss": ctc, "data": padded()}, ["mask.sum()"]),
    "a small statistic": (
        {"loss": lambda o, t: F.cross_entropy(o, t) + 1e-3 * o.mean(0).square().sum(), **SEVEN},
        ["contrastive"],
    ),
    "no pair": ({"loss": lambda o, t: (F.cross_entropy(o, t), 1), **SEVEN}, ["(loss * mask).sum(), mask.sum()"]),
    "padded to the longest": (
        {"model": series_net, "data": ragged(), "loading": PADDED, "loss": F.mse_loss},
        ["no mean over rows", "mask.sum()"],
    ),
    "divided by a number of the batch": (
        {
            "inputs": ["ids"],
            "loading": nbkit.Loading(shuffle=False, collate=counted),
            "loss": lambda o, b: tokens(o, b["labels"], reduction="sum") / b["num"],
        },
        ["no mean over rows", "mask.sum()"],
    ),
    "labels inside, divided by hand": (
        {**WITH_LABELS, "model": lambda: Inside("by hand"), "loss": lambda o, _: o["loss"]},
        ["reduction='sum'", "batch['labels'] != -100"],
    ),
    "an unnamed term inside": (
        {**PLAIN_LABELS, "model": lambda: Inside("unnamed"), "loss": lambda o, _: o},
        ["output['aux_loss']"],
    ),
}  # fmt: skip

LOOPS = ("ddp", "zero1", "zero3")
LOOPED_IN_ALL = ("ignored labels", "a sum", "labels inside, divided by hand")

# name -> (arguments of the Trainer, the loss of a batch in one process), for means over rows and for (sum, weight)
Mean = Callable[[Any, Any], Tensor]
EQUAL: dict[str, tuple[dict[str, Any], Mean]] = {
    "plain": ({"loss": tokens, "data": texts(masked=False)}, tokens),
    "ignored labels": ({"loss": tokens}, tokens),
    "ignored padding": (
        {"loss": lambda o, t: tokens(o, t, ignore_index=0), "data": padded()},
        lambda o, t: tokens(o, t, ignore_index=0),
    ),
    "smoothed class weights": (
        {"loss": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, label_smoothing=0.1), **SEVEN},
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, label_smoothing=0.1),
    ),
    "labels inside": ({"loss": lambda o, _: o["loss"], **WITH_LABELS}, lambda o, _: o["loss"]),
    "ignored labels by their sum": (
        {"loss": lambda o, t: (tokens(o, t, reduction="sum"), (t != -100).sum())},
        tokens,
    ),
    "class weights by their sum": (
        {"loss": lambda o, t: (F.cross_entropy(o, t, reduction="sum", weight=WEIGHTS), WEIGHTS[t].sum()), **SEVEN},
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS),
    ),
    "a sum by its rows": (
        {"loss": lambda o, t: (F.cross_entropy(o, t, reduction="sum"), len(t)), **SEVEN},
        F.cross_entropy,
    ),
    "a penalty of rows": (
        {"loss": lambda o, t: tokens(o, t) + o.square().mean()},
        lambda o, t: tokens(o, t) + o.square().mean(),
    ),
    "hidden words and kinds of rows": (
        {"model": Pretraining, "loss": lambda o, _: o["loss"], **WITH_KINDS},
        lambda o, _: o["loss"],
    ),
    "labels inside, all kept": ({"loss": lambda o, _: o["loss"], **PLAIN_LABELS}, lambda o, _: o["loss"]),
}  # fmt: skip


# These also run with a stream of data and in the user's own loop, where the loss is tried on other batches.
EVERY_WAY = ("labels inside", "a sum by its rows")


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def made(asked: dict[str, Any], **changed: Any) -> Any:
    return quiet(
        **(
            {"model": Words, "data": texts(), "optimizer": sgd, "loading": nbkit.Loading(shuffle=False)}
            | asked
            | changed
        )
    )


def streamed(asked: dict[str, Any], **changed: Any) -> Any:
    rows = asked.get("data", texts())
    loading = replace(asked.get("loading", nbkit.Loading()), shuffle=None)
    return made(asked, data=Stream(rows), loading=loading, **changed)


def looped(asked: dict[str, Any], **changed: Any) -> list[float]:
    """Return the losses of two steps of the user's own loop."""
    asked = {"model": Words, "data": texts(), "loss": by_hand} | asked | changed
    collate = asked.pop("loading", nbkit.Loading()).collate
    loader = DataLoader(asked.pop("data"), batch_size=BATCH, collate_fn=collate)
    job = nbkit.prepare(asked.pop("model"), sgd, log_dir=None, seed=7, **asked)
    losses: list[float] = []
    for batch in job.batches(loader):
        if len(losses) == 2:
            return losses
        losses.append(float(job.backward(batch).loss))
        assert job.step == len(losses) - 1
        job.optimizer.step()
        job.optimizer.zero_grad()
    return losses


def refusals(world: Any) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}

    def note(how: str, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except NbkitError as error:
            found[how, name] = str(error)

    for name, (asked, _) in REFUSED.items():
        note("trainer", name, lambda asked=asked: made(asked))  # type: ignore[misc]
        for strategy in LOOPS if name in LOOPED_IN_ALL else LOOPS[:1]:
            note(f"loop {strategy}", name, lambda asked=asked, s=strategy: looped(asked, strategy=s))  # type: ignore[misc]
        trainer = streamed(asked)
        before = next(iter(trainer.model.parameters())).clone()
        note("stream", name, lambda trainer=trainer: trainer.fit(1))  # type: ignore[misc]
        assert trainer.step == 0 and torch.equal(before, next(iter(trainer.model.parameters())))
    return found


def test_a_loss_that_is_no_mean_over_rows_is_refused_before_the_first_step() -> None:
    found = run_ranks(refusals, 2, timeout=240)

    assert found[0] == found[1]
    for name, (_, words) in REFUSED.items():
        loops = LOOPS if name in LOOPED_IN_ALL else LOOPS[:1]
        for how in ("trainer", "stream", *(f"loop {strategy}" for strategy in loops)):
            said = found[0].get((how, name), "")
            if name in ("padded to the longest", "divided by a number of the batch") and how.startswith("loop"):
                continue  # the loader has padded the whole batch, or the number cannot be cut
            wanted = ["no mean over rows"] if how == "loop zero3" else [word for word in words if "dp=2" not in word]
            assert [word for word in wanted if word not in said] == [], (how, name, said)


class Weights:
    """The weight of a second term of the loss. A callback changes it during the training."""

    other = 0.0


def summed_later(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + Weights.other * output.square().sum()


def compared_later(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + Weights.other * (output @ output.T).square().mean()


def row_by_row(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + Weights.other * output.square().mean()


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return tokens(output, target) * (1 + Weights.other)


def penalised_later(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over targets plus, later, a mean over rows. The first check sees only the mean over targets."""
    return tokens(output, target) + Weights.other * output.square().mean()


def annealed(
    world: Any, loss: Any, asked: dict[str, Any], then: str = "", only: int | None = None
) -> tuple[str, int, list[Any]]:
    def raise_weight(_: Any, record: dict[str, Any]) -> None:
        if only in (None, world.place.rank):
            Weights.other = 0.01 * max(record["step"] - 1, 0)

    Weights.other = 0.0
    trainer = made({**asked, "loss": loss}, callbacks=[raise_weight])
    states, said = [], ""
    for strategy in (then, "ddp") if then else ():
        trainer.switch(strategy)  # checked here, so it is not compared with one process later
    try:
        for _ in range(4):
            trainer.fit(1)
            states.append(trainer.full_state_dict())
            if then and trainer.step == 2:  # the weight has just changed
                trainer.switch(then)
    except NbkitError as error:
        said = str(error)
        assert all(torch.equal(old, new) for old, new in zip(states[-1].values(), held(trainer), strict=True))
    return said, trainer.step, [record["loss"] for record in trainer.history]


def held(trainer: Any) -> Any:
    return trainer.model.state_dict().values()


def test_a_value_that_changes_on_one_rank_ends_the_training_of_all_ranks() -> None:
    found = run_ranks(annealed, 2, summed_later, SEVEN, "", 1, timeout=60)
    assert [steps for _, steps, _ in found] == [2, 2]
    assert all("no longer a mean over rows" in said for said, *_ in found), found


@pytest.mark.parametrize(
    ("loss", "asked", "hint"),
    [(summed_later, SEVEN, "len(target)"), (compared_later, SEVEN, "contrastive"), (penalised_later, {}, "mask.sum()")],
)
def test_training_ends_before_a_wrong_step_when_the_loss_stops_being_a_mean(
    loss: Any, asked: dict[str, Any], hint: str
) -> None:
    for said, steps, _ in run_ranks(annealed, 2, loss, asked):
        assert steps == 2
        assert "'Weights.other' 0 -> 0.01" in said and "no longer a mean over rows" in said and hint in said


def test_all_ranks_end_if_one_rank_sees_the_changed_loss() -> None:
    found = run_ranks(
        annealed, 2, summed_later, {**SEVEN, "data": labelled()[:19]}
    )  # of the last 3 rows, rank 1 has one
    assert [steps for _, steps, _ in found] == [2, 2]
    assert "rows of rank 0" in found[1][0] and "2 rows" in found[0][0]
    assert all("'Weights.other' 0 -> 0.01" in said and "no longer a mean over rows" in said for said, *_ in found)


def test_a_switch_after_the_loss_changed_does_not_hide_the_change() -> None:
    for said, steps, _ in run_ranks(annealed, 2, summed_later, SEVEN, "zero2"):
        assert steps == 2 and "'Weights.other' 0 -> 0.01" in said


@pytest.mark.parametrize(("loss", "asked"), [(row_by_row, SEVEN), (ignoring, {})])
def test_training_continues_if_only_a_weight_in_the_loss_changes(loss: Any, asked: dict[str, Any]) -> None:
    found = run_ranks(annealed, 2, loss, asked)
    (alone,) = run_ranks(annealed, 1, loss, asked)

    for said, steps, losses in found:
        assert (said, steps) == ("", 4)
        assert losses == pytest.approx(alone[2])


def alone(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (asked, _) in REFUSED.items():
        made(asked).fit(1)
        try:
            made(asked, compute=nbkit.Compute(microbatch_size=2))
        except NbkitError as error:
            found[name] = str(error)
    found["loop"] = looped({})
    return found


@pytest.mark.long
def test_one_rank_computes_whole_batches_unless_it_makes_micro_batches() -> None:
    (found,) = run_ranks(alone, 1)

    assert [name for name in REFUSED if "with microbatch_size= computes parts" not in found.get(name, "")] == []
    assert len(found["loop"]) == 2


def one_process(asked: dict[str, Any], mean: Mean, steps: int) -> list[float]:
    """Return the losses of plain torch over whole batches."""
    asked = {"model": Words, "data": texts()} | asked
    torch.manual_seed(7)
    model = asked["model"]()
    optimizer, losses = sgd(model), []
    batches = list(DataLoader(asked["data"], batch_size=BATCH))
    for batch in batches[:steps]:
        value, target = ([batch[key] for key in asked["inputs"]], batch) if "inputs" in asked else (batch[:1], batch[1])
        loss = mean(model(*value), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(world: Any) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    ways = {"ddp": {}, "zero3": {"strategy": "zero3"}, "microbatch_size": {"compute": nbkit.Compute(microbatch_size=2)}}
    for number, (name, (asked, mean)) in enumerate(EQUAL.items()):
        expected = one_process(asked, mean, 2)
        in_turn = list(ways)[number % len(ways)]
        for how, changed in ways.items() if name in EVERY_WAY else [(in_turn, ways[in_turn])]:
            trainer = made(asked, **changed)
            losses = [record["loss"] for record in trainer.fit(2)]
            found[how, name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            if name not in EVERY_WAY:
                continue
            losses = [record["loss"] for record in streamed(asked, **changed).fit(2)]
            found[f"stream {how}", name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            losses = looped(asked, **changed)
            found[f"loop {how}", name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return found


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_the_suggested_lines_train_as_one_process_does() -> None:
    found = run_ranks(trained, 2, timeout=240)[0]

    assert {key: away for key, away in found.items() if not away < 1e-9} == {}
    assert len(found) == len(EQUAL) + 8 * len(EVERY_WAY)


def later(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    trainer = made({"loss": by_hand}, strategy="tp")
    trainer.fit(1)
    with pytest.raises(NbkitError) as raised:
        trainer.switch("ddp")
    trainer.fit(1)
    found["switch"] = [str(raised.value), str(trainer.strategy), trainer.step]
    # The first batch ignores nothing.
    rows = texts(masked=False)[:BATCH] + texts()
    for strategy in ("ddp", "zero3"):
        with pytest.raises(NbkitError) as raised:
            looped({"data": rows}, strategy=strategy)
        found[strategy] = str(raised.value)
    # A term that a module stores as an attribute.
    model = Inside("noted")
    with pytest.raises(NbkitError) as raised:
        made({**PLAIN_LABELS, "model": model, "loss": noted(model)})
    found["noted"] = str(raised.value)
    return found


def test_switches_later_batches_and_terms_outside_the_output_are_checked() -> None:
    found = run_ranks(later, 2)[0]

    refused, strategy, step = found["switch"]
    assert "no mean over rows" in refused and strategy == "tp=2" and step == 2
    assert all("no mean over rows" in found[name] for name in ("ddp", "zero3", "noted"))


class Minded(nn.Module):
    """A model that counts its calls, draws numbers, and keeps a running count. The check may change none of these."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = points_net(), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.inner(F.dropout(x, 0.1, self.training))


class Drawn:
    """A dataset that draws random numbers while it is read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Row:
        import random

        return torch.full((6,), random.random() + torch.rand(()).item(), dtype=torch.float64), torch.tensor(i % 7)


def undisturbed(world: Any) -> list[Any]:
    import random

    random.seed(1)
    torch.manual_seed(1)
    quiet(data=Drawn(), model=Minded, loss=F.cross_entropy, optimizer=sgd)
    drawn = random.random(), torch.rand(()).item()
    model: Any = Minded()
    job = nbkit.prepare(model, sgd, loss=F.cross_entropy, log_dir=None)
    for batch in job.batches(DataLoader(labelled(), batch_size=BATCH)):
        job.backward(batch)
        break
    return [*drawn, job.model.calls, int(job.model.seen), job.model.training]


def test_the_loss_check_changes_no_state() -> None:
    # Rank 0 makes the check.
    first, second = run_ranks(undisturbed, 2)

    assert first == second and first[2:] == [1, 1, True]


class Averaged(nn.Module):
    """A model that takes the mean over all positions, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, series: Tensor) -> Tensor:
        averaged: Tensor = self.out(torch.tanh(self.inner(series)).mean(1))
        return averaged


def test_a_model_that_reads_padding_gets_the_hint_to_mask_it() -> None:
    rows = [(one, one.mean(0)) for one, _ in ragged()]

    def collate(some: list[Row]) -> list[Tensor]:
        return [pad_sequence([one for one, _ in some], batch_first=True), torch.stack([target for _, target in some])]

    model = Averaged()
    found = examine(model, model, F.mse_loss, Sample(collate(rows), rows, collate), None).coupled

    assert found is not None and "reads their padding" in found.what and "a mask over the padding" in found.hint


class TwoHeads(nn.Module):
    """A model whose second head returns one number per row, under the name of an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = nn.Linear(6, 16), nn.Linear(16, 7), nn.Linear(16, 1)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return {"logits": self.head(hidden), "aux": self.aux(hidden)}


def test_an_output_of_one_number_per_row_is_no_auxiliary_loss() -> None:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target) + F.mse_loss(output["aux"][:, 0], target.double())

    model, rows = TwoHeads(), labelled()
    sample = Sample(torch.utils.data.default_collate(rows[:BATCH]), rows)
    assert examine(model, model, loss, sample, None).coupled is None

    def uneven(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return loss(output, target) + output["aux"].square().sum()

    found = examine(model, model, uneven, sample, None).coupled
    assert found is not None and "The loss is no mean over rows" in found.what
