"""Test that a user's edits of a model between two steps act as in one process, or are refused by name."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import SEED, points
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

import nbkit
from nbkit.errors import NbkitError, StrategyError, TrainingError
from nbkit.rank.train.job import prepare
from nbkit.rank.train.trainer import Trainer

DATA = [(x.double(), y) for x, y in points(64)]
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "dp=1 tp=2", "pp"]

QUICKLY = pytest.mark.usefixtures("rows_are_known")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Picture(nn.Module):
    """A model with weights that can have another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.head = nn.Conv2d(1, 4, (2, 3)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.grow(x.view(-1, 1, 2, 3))).flatten(1))


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return make().double()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer_of(make: Callable[[], nn.Module], strategy: str, **changed: Any) -> Trainer:
    settings: dict[str, Any] = {
        "model": lambda: built(make),
        "loss": F.cross_entropy,
        "optimizer": momentum,
        "data": DATA,
        "batch_size": 8,
        "loading": nbkit.Loading(shuffle=False),
        "strategy": strategy,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(settings | changed))


class Alone:
    """The same training in one process, in plain torch."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.model = built(make)
        self.optimizer, self.step = momentum(self.model), 0

    def fit(
        self, steps: int, penalty: Callable[[nn.Module], Any] = lambda _: 0.0, after: Callable[[Any], Any] = id
    ) -> None:
        for _ in range(steps):
            x, y = (torch.stack(part) for part in zip(*DATA[8 * self.step : 8 * self.step + 8], strict=True))
            (F.cross_entropy(self.model(x), y) + penalty(self.model)).backward()
            after(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def other_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def by_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def there_and_back(model: nn.Module) -> None:
    model.float().double()


def other_order(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def assigned(model: nn.Module) -> None:
    """Assign parameters like load_state_dict(assign=True). In plain torch, the optimizer would not know them."""
    for part in model.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(p.detach() * 0.5))


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def edited(world: Any, folder: str, cases: list[Any]) -> list[list[dict[str, Tensor]]]:
    """Return the weights of each case: after an edit; in a job that loads them after a step and another edit; after a
    switch; and after a step under the new strategy."""
    found = []
    for make, edit, strategy in cases:
        trainer = trainer_of(make, strategy)
        trainer.fit(2)
        edit(trainer.model)
        states = [trainer.full_state_dict()]
        trainer.fit(1)
        edit(trainer.model)
        trainer.save(folder)
        other = trainer_of(make, "ddp")
        other.load(folder)
        trainer.switch("zero2" if strategy == "ddp" else "ddp")
        states += [other.full_state_dict(), trainer.full_state_dict()]
        trainer.fit(1)
        found.append([*states, trainer.full_state_dict()])
    return found


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@QUICKLY
def test_new_memory_of_parameters_is_trained_saved_and_switched(tmp_path: Path, strategy: str) -> None:
    edits = [(Net, other_memory), (Net, assigned)]
    edits += [(Picture, other_order)] if strategy in STRATEGIES[:3] else [(Net, by_vector)]
    edits += [(Net, there_and_back)] if strategy == "ddp" else []
    cases = [(make, edit, strategy) for make, edit in edits]
    for rank in run_ranks(edited, 2, str(tmp_path / "saved"), cases):
        for (after, loaded, switched, on), (make, edit, _) in zip(rank, cases, strict=True):
            same = edit if edit in (there_and_back, other_order) else in_place
            alone = Alone(make)
            alone.fit(2)
            same(alone.model)
            assert_alike(after, alone.full_state_dict())
            alone.fit(1)
            same(alone.model)
            assert_alike(loaded, alone.full_state_dict())
            assert_alike(switched, alone.full_state_dict())
            alone.fit(1)
            assert_alike(on, alone.full_state_dict())


def pruned(model: nn.Module) -> None:
    prune.random_unstructured(model.head, "weight", 0.5)


def normed(model: nn.Module) -> None:
    weight_norm(model.head)


def tied(model: nn.Module) -> None:
    model.blocks[0].up.weight = model.blocks[1].up.weight


def halved(model: nn.Module) -> None:
    model.half()


def refused(world: Any, edits: list[Any], strategies: list[str]) -> list[list[str]]:
    found = []
    for strategy in strategies:
        for edit in edits:
            said = []
            trainer = trainer_of(Net, strategy)
            trainer.fit(1)
            edit(trainer.model)
            for act in (trainer.full_state_dict, lambda trainer=trainer: trainer.fit(1)):
                with pytest.raises(NbkitError) as raised:
                    act()
                said.append(str(raised.value))
            found.append(said)
    return found


@QUICKLY
def test_edits_that_cannot_be_used_are_refused_by_name() -> None:
    moved = "was moved or removed"
    edits = {pruned: f"'head.weight' {moved}", normed: f"'head.weight' {moved}", tied: f"'blocks.0.up.weight' {moved}"}
    edits[halved] = "was replaced after the job was built"
    (first, second) = run_ranks(refused, 2, list(edits), ["ddp", "zero1", "zero3"])
    assert first == second
    found = iter(first)
    for _ in range(3):
        for wanted in edits.values():
            assert all(wanted in said for said in next(found))


def held_parts(world: Any, chains: list[str]) -> list[list[list[Any]]]:
    """Return for each chain: whether modules held in variables since before the job are the current ones; their
    weights; and the error of a parameter held since before the job."""
    found = []
    for chain in chains:
        first, *later = chain.split(" > ")
        model = built(Net)
        blocks, head, weight = model.blocks, model.head, model.head.weight
        trainer = trainer_of(Net, first, model=model)
        trainer.fit(1)
        since = trainer.model.head
        for strategy in later:
            trainer.switch(strategy)
            trainer.fit(1)
        now = trainer.model
        parts = [blocks is now.blocks, head is now.head, since is now.head, head.weight is now.head.weight]
        trainer.switch("ddp")
        found.append([all(parts), head.weight.detach().clone(), trainer.full_state_dict()["head.weight"]])
        trainer.switch("zero1")
        try:
            found[-1].append(str(weight.sum()))
        except TrainingError as error:
            found[-1].append(str(error))
    return found


@QUICKLY
def test_modules_in_variables_stay_current_and_old_parameters_raise() -> None:
    for rank in run_ranks(held_parts, 2, ["ddp", "zero1 > dp=1 tp=2", "zero3 > pp", "pp > zero2"]):
        for alike, held, whole, said in rank:
            assert alike and torch.equal(held, whole)
            assert "'head.weight' before zero1 took over" in said or "'head.weight' before" in said, said
            assert "get_parameter('head.weight')" in said


def penalised(world: Any, strategies: list[str]) -> list[list[str]]:
    """Return the errors of a user's own backward before and after the job's, and the job's final state."""
    found = []
    batches = [tuple(torch.stack(part) for part in zip(*DATA[at : at + 8], strict=True)) for at in (0, 8)]
    for strategy in strategies:
        job = prepare(
            lambda: built(Net),
            momentum,
            loss=F.cross_entropy,
            strategy=strategy,
            hints=nbkit.ModelHints(example=batches[0]),
            log_dir=None,
        )

        def penalty(job: Any = job) -> None:
            sum(p.pow(2).sum() for _, p in job.model.named_parameters()).backward()

        penalty()
        said = []
        for act in (lambda job=job: job.backward(batches[0]), penalty):
            with pytest.raises(TrainingError) as raised:
                act()
            said.append(str(raised.value))
            job.backward(batches[0])
        job.optimizer.step()
        job.optimizer.zero_grad()
        penalty()  # leaves gradients, like the loss of another model that goes through this one
        job.model.zero_grad()
        job.optimizer.zero_grad(set_to_none=False)
        job.backward(batches[1])
        job.optimizer.step()
        found.append([*said, job.full_state_dict()])
    return found


@pytest.mark.long
@QUICKLY
def test_a_users_own_backward_is_refused_before_and_after_that_of_the_job() -> None:
    alone = Alone(Net)
    alone.fit(2)
    hybrid = "zero=3 dp=4 shard=2"
    for rank in [*run_ranks(penalised, 2, STRATEGIES), *run_ranks(penalised, 4, [hybrid])]:
        for before, after, state in rank:
            assert "from before job.backward" in before and "penalty(model)" in before, before
            assert "of your own has added" in after and "penalty(model)" in after, after
            assert_alike(state, alone.full_state_dict())


def in_the_loss(world: Any, strategies: list[str]) -> list[Any]:
    found: list[Any] = []
    for strategy in strategies:
        model = built(Net)
        head, made = model.head, {"model": model}

        def loss(output: Tensor, target: Tensor, head: Any = head, made: Any = made) -> Tensor:
            penalty = head.weight.norm() + sum(p.pow(2).sum() for p in made["model"].parameters())
            return F.cross_entropy(output, target) + 0.1 * penalty

        try:
            trainer = trainer_of(Net, strategy, model=model, loss=loss)
            trainer.fit(2)
            found.append(trainer.full_state_dict())
        except StrategyError as error:
            found.append(str(error))
    return found


def test_a_penalty_in_the_loss_counts_once_or_is_refused_if_weights_are_split() -> None:
    alone = Alone(Net)
    penalty = lambda model: model.head.weight.norm() + sum(p.pow(2).sum() for p in model.parameters())  # noqa: E731
    alone.fit(2, lambda model: 0.1 * penalty(model))
    for *whole, tp, pp in run_ranks(in_the_loss, 2, ["ddp", "zero2", "zero3", "dp=1 tp=2", "pp"]):
        for state in whole:
            assert_alike(state, alone.full_state_dict())
        assert all("The loss reads the model's parameter 'head.weight'" in said for said in (tp, pp)), (tp, pp)


def copied(world: Any, strategies: list[str]) -> list[list[Any]]:
    """Return by strategy the weights in a state dict, a copy, an average and a pickle, or errors; and all weights."""
    found = []
    for strategy in strategies:
        trainer = trainer_of(Net, strategy)
        trainer.fit(1)
        model, head = trainer.model, trainer.model.head
        asked: list[Callable[[], Any]] = [
            lambda model=model: model.state_dict(),
            lambda head=head: {f"head.{name}": tensor for name, tensor in head.state_dict().items()},
            lambda model=model: nn.ModuleList([model])[0].state_dict(),
            lambda model=model: copy.deepcopy(model).state_dict(),
            lambda head=head: {f"head.{name}": tensor for name, tensor in copy.deepcopy(head).state_dict().items()},
            lambda model=model: AveragedModel(model).module.state_dict(),
            lambda model=model: saved_by_torch(model).state_dict(),
        ]
        said: list[Any] = []
        for ask in asked:
            try:
                said.append({name: tensor.clone() for name, tensor in ask().items()})
            except StrategyError as error:
                said.append(str(error))
        trainer.switch("ddp")
        said.append(dict(trainer.model.state_dict()))
        found.append([*said, trainer.full_state_dict()])
    return found


def saved_by_torch(model: nn.Module) -> nn.Module:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.long
@QUICKLY
def test_copies_of_only_a_part_of_the_weights_get_a_hint() -> None:
    for rank in run_ranks(copied, 2, STRATEGIES):
        for strategy, (*asked, switched, whole) in zip(STRATEGIES, rank, strict=True):
            assert_alike(switched, whole)
            for found in asked:
                if strategy in ("ddp", "zero1", "zero2"):
                    assert_alike(found, {name: tensor for name, tensor in whole.items() if name in found})
                    assert "head.weight" in found
                else:
                    assert "trainer.full_state_dict()" in found and "splits them over the ranks" in found, found


class Two(nn.Module):
    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def two_jobs(world: Any) -> list[Any]:
    batches = [tuple(torch.stack(part) for part in zip(*DATA[at : at + 8], strict=True)) for at in (0, 8)]

    def jobs(strategies: list[str]) -> list[Any]:
        torch.manual_seed(SEED)
        trunk = Block().double()
        models = [Two(trunk, nn.Linear(6, 3).double()) for _ in strategies]
        return [
            prepare(
                model,
                momentum,
                loss=F.cross_entropy,
                strategy=strategy,
                hints=nbkit.ModelHints(example=batches[0]),
                log_dir=None,
            )
            for model, strategy in zip(models, strategies, strict=True)
        ]

    found: list[Any] = []
    for strategies in (["zero1", "zero1"], ["ddp", "zero3"], ["zero2", "ddp"]):
        with pytest.raises(TrainingError) as raised:
            jobs(strategies)
        found.append(str(raised.value))
    both = jobs(["ddp", "ddp"])
    for batch in batches:
        for job in both:
            job.backward(batch)
            job.optimizer.step()
            job.optimizer.zero_grad()
    found += [job.full_state_dict() for job in both]
    with pytest.raises(TrainingError) as raised:
        both[0].switch("zero1")
    found.append(str(raised.value))

    first = prepare(both[0].model, momentum, loss=F.cross_entropy, strategy="ddp", log_dir=None)
    del both, job
    prepare(first.model, momentum, loss=F.cross_entropy, strategy="zero1", log_dir=None)
    with pytest.raises(TrainingError) as raised:
        first.backward(batches[0])
    return [*found, str(raised.value)]


@QUICKLY
def test_jobs_that_share_parameters_train_right_or_are_refused() -> None:
    torch.manual_seed(SEED)
    trunk = Block().double()
    models = [Two(trunk, nn.Linear(6, 3).double()) for _ in range(2)]
    alone = [Alone(lambda model=model: model) for model in models]
    for _ in range(2):
        for each in alone:
            each.fit(1)
    for refused, hybrid, later, one, two, switched, taken in run_ranks(two_jobs, 2):
        for said in (refused, hybrid, later, switched):
            assert "Another job trains the parameter 'trunk." in said and "strategy='ddp'" in said, said
        assert "taken over the model" in taken, taken
        assert_alike(one, alone[0].full_state_dict())
        assert_alike(two, alone[1].full_state_dict())


def in_no_group(world: Any, strategies: list[str]) -> list[tuple[dict[str, Tensor], list[float]]]:
    found = []
    for strategy in strategies:
        trainer = trainer_of(
            Net, strategy, optimizer=lambda model: momentum(model.head), compute=nbkit.Compute(grad_norm_every=1)
        )
        trainer.fit(3)
        found.append((trainer.full_state_dict(), [record["grad_norm"] for record in trainer.history]))
    return found


@QUICKLY
def test_gradients_of_parameters_without_a_group_do_not_add_up_over_steps() -> None:
    alone = Alone(Net)
    alone.optimizer = momentum(alone.model.head)  # type: ignore[arg-type]
    norms = []
    for _ in range(3):
        alone.fit(1, after=lambda model: norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        alone.model.zero_grad()
    for rank in run_ranks(in_no_group, 2, ["ddp", "zero1", "zero3", "pp"]):
        for state, found in rank:
            assert_alike(state, alone.full_state_dict())
            assert found == pytest.approx([float(norm) for norm in norms], rel=1e-6)


def normalised(world: Any, strategies: list[str]) -> list[Any]:
    """Return the weights if columns are normalised between steps, and the warnings."""
    found = []
    for strategy in strategies:
        trainer = trainer_of(Net, strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                trainer.fit(1)
                columns(trainer.model)
        said = [str(each.message) for each in caught if "changed between two steps" in str(each.message)]
        found.append([trainer.full_state_dict(), said])
    return found


@torch.no_grad()
def columns(model: nn.Module) -> None:
    weight = model.blocks[0].up.weight
    weight.div_(weight.norm(dim=0, keepdim=True))


def quietly(world: Any, strategies: list[str]) -> list[str]:
    """Return the warnings of steps, a load and a switch, without edits of weights."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy in strategies:
            trainer = trainer_of(Net, strategy)
            trainer.fit(2)
            trainer.evaluate(DATA)
            trainer.switch("dp=1 tp=2" if strategy == "zero3" else "zero3")
            trainer.fit(2)
    return [str(each.message) for each in caught if "changed between" in str(each.message)]


@pytest.mark.long
@QUICKLY
def test_columns_normalised_between_steps_are_right_or_warn_once() -> None:
    alone = Alone(Net)
    for _ in range(3):
        alone.fit(1)
        columns(alone.model)
    for zero2, zero3, tp in run_ranks(normalised, 2, ["zero2", "zero3", "dp=1 tp=2"])[:1]:
        assert zero2[1] == []
        assert_alike(zero2[0], alone.full_state_dict())
        for parts in (zero3, tp):
            assert len(parts[1]) == 1 and "switch('zero2')" in parts[1][0]
    assert run_ranks(quietly, 2, ["zero3", "dp=1 tp=2"]) == [[], []]


@torch.no_grad()
def through_groups(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            p.clamp_(-0.2, 0.2)


@torch.no_grad()
def drawn(trainer: Trainer) -> None:
    torch.manual_seed(trainer.job.rank)
    trainer.model.blocks[1].up.weight.normal_()


@torch.no_grad()
def on_one_rank(trainer: Trainer) -> None:
    if trainer.job.rank == 1:
        trainer.model.head.bias.add_(1)


@torch.no_grad()
def there_and_back_on_one_rank(trainer: Trainer) -> None:
    if trainer.job.rank == 1:
        for p in trainer.model.parameters():
            p.copy_(p.clone())


def all_in_place(trainer: Trainer) -> None:
    in_place(trainer.model)


def assigned_parts(trainer: Trainer) -> None:
    for p in trainer.model.parameters():
        p.data = p.data / p.data.norm()


def edits_in_callbacks(world: Any, cases: list[tuple[Callable[[Trainer], None], str]]) -> list[str]:
    """Return what each case says: the error, or the warning."""
    found = []
    for edit, strategy in cases:
        # After the first four steps, in which nbkit always compares weights.
        late = [lambda trainer, record, edit=edit: edit(trainer) if record["step"] > 5 else None]
        trainer = trainer_of(Net, strategy, callbacks=late)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(9)
                found.append("".join(str(each.message) for each in caught if "changed between" in str(each.message)))
            except TrainingError as error:
                found.append(str(error))
    return found


@QUICKLY
def test_weights_that_become_different_on_each_rank_are_refused() -> None:
    """Equal changes, and changes that are undone, are not refused."""
    cases = {
        (through_groups, "zero1"): "ranks have different weights",
        (through_groups, "zero2"): "ranks have different weights",
        (drawn, "ddp"): "ranks have different weights",
        (drawn, "zero1"): "ranks have different weights",
        (on_one_rank, "ddp"): "ranks have different weights",
        (on_one_rank, "zero2"): "Only some ranks changed their weights",
        (there_and_back_on_one_rank, "ddp"): "",
        (all_in_place, "zero1"): "",
        (assigned_parts, "dp=1 tp=2"): "wrong if the change needs norms",
    }
    first, second = run_ranks(edits_in_callbacks, 2, list(cases))
    for text, (_, strategy), expected in zip(first, cases, cases.values(), strict=True):
        assert (expected in text) if expected else text == "", (strategy, text)
    assert second[:-1] == first[:-1]  # rank 0 warns


class Twin(nn.Module):
    """A block with a slow copy of itself that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = Block(), Block().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x) + 0.1 * self.slow(x)


class Student(nn.Module):
    """A model with slow copies that follow it. apart: one copy before the blocks, else one in each block."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        kind = Block if apart else Twin
        self.teacher = nn.Sequential(Block(), Block()).requires_grad_(False) if apart else nn.Identity()
        self.blocks, self.head = nn.Sequential(kind(), kind()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x) + 0.1 * self.teacher(x))


def followed(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return pairs of (a parameter that follows, the parameter that it follows)."""
    if len(list(model.teacher.children())):
        return list(zip(model.teacher.parameters(), model.blocks.parameters(), strict=True))
    parts = [zip(block.slow.parameters(), block.fast.parameters(), strict=True) for block in model.blocks]
    return [pair for pairs in parts for pair in pairs]


def by_data(pairs: list[Any]) -> None:
    for slow, fast in pairs:
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


@torch.no_grad()
def by_lerp(pairs: list[Any]) -> None:
    for slow, fast in pairs:
        slow.lerp_(fast, 0.1)


def by_copy(pairs: list[Any]) -> None:
    for slow, fast in pairs:
        slow.data.copy_(0.9 * slow.data + 0.1 * fast.detach())


@torch.no_grad()
def by_each(pairs: list[Any]) -> None:
    slow, fast = (list(each) for each in zip(*pairs, strict=True))
    torch._foreach_mul_(slow, 0.9)
    torch._foreach_add_(slow, fast, alpha=0.1)


FOLLOWS = [by_data, by_lerp, by_copy, by_each]


def followers(world: Any, cases: list[Any]) -> list[Any]:
    """Return for each case the weights after three steps, or the error. After each step, one part follows another."""
    found: list[Any] = []
    for strategy, apart, follow in cases:
        trainer = trainer_of(lambda apart=apart: Student(apart), strategy, optimizer=trained)
        try:
            for _ in range(3):
                trainer.fit(1)
                follow(followed(trainer.model))
            found.append(trainer.full_state_dict())
        except StrategyError as error:
            found.append(str(error))
        if strategy == "pp":
            outer = AveragedModel(built(lambda apart=apart: Student(apart)))
            with pytest.raises(StrategyError) as raised:
                outer.update_parameters(trainer.model)
            found.append(str(raised.value))
    return found


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.long
@QUICKLY
def test_a_part_that_follows_another_is_right_or_refused_in_another_stage() -> None:
    cases: list[Any] = [("ddp", True, by_data), ("zero3", True, by_each), ("dp=1 tp=2", True, by_lerp)]
    cases += [("pp", False, follow) for follow in FOLLOWS] + [("pp", True, follow) for follow in FOLLOWS]
    for rank in run_ranks(followers, 2, cases, timeout=120):
        found = iter(rank)
        for strategy, apart, follow in cases:
            state = next(found)
            if strategy == "pp" and apart:
                assert "A stage of the pipeline uses the parameter" in state and "zero2" in state, state
            else:
                alone = Alone(lambda apart=apart: Student(apart))
                alone.optimizer = trained(alone.model)  # type: ignore[assignment]
                for _ in range(3):
                    alone.fit(1)
                    follow(followed(alone.model))
                assert_alike(state, alone.full_state_dict())
            if strategy == "pp":
                assert "does not hold it" in next(found)
