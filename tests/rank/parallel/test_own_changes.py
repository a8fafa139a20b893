"""Test that a model that changes itself in forward or backward trains as in one process, or is refused by name."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.train.trainer import Trainer

ROWS, WIDTH, STEPS = 8, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Taught(nn.Module):
    """A student with a teacher without gradients. follows: each forward moves the teacher towards the student."""

    def __init__(self, follows: bool = True) -> None:
        super().__init__()
        self.follows = follows
        self.student = nn.Sequential(Block(), Block())
        self.teacher = nn.Sequential(Block(), Block()).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True) if self.follows else ()
            for own, theirs in pairs:
                own.mul_(0.5).add_(theirs, alpha=0.5)
            wanted = self.teacher(x.flip(-1))
        return self.student(x), wanted


class Counting(Block):
    """A block that keeps an unused running mean of the size of its output."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(WIDTH))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size = 0.9 * self.size + 0.1 * y.detach().abs().mean((0, 1))
        return y


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def rows() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randn(ROWS * STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(row, row.roll(1)) for row in drawn]


def batch() -> tuple[Tensor, Tensor]:
    values, targets = zip(*rows()[:ROWS], strict=True)
    return torch.stack(values), torch.stack(targets)


def loss(output: Any, target: Tensor) -> Tensor:
    student, teacher = output
    return F.mse_loss(student, target) + F.mse_loss(student, teacher)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def trained(world: Any, make: Callable[[], nn.Module], strategies: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for strategy in strategies:
        trainer = Trainer(
            model=lambda: built(make),
            loss=loss,
            optimizer=sgd,
            data=rows(),
            batch_size=ROWS,
            loading=nbkit.Loading(shuffle=False),
            strategy=strategy,
            log_dir=None,
            progress=False,
        )
        trainer.fit(STEPS)
        found.append({name: tensor.clone() for name, tensor in trainer.full_state_dict().items()})
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "strategies"), [(Taught, ["ddp", "zero2", "tp"]), (partial(Taught, follows=False), ["pp", "zero3"])]
)
def test_a_student_with_a_teacher_trains_as_in_one_process(
    make: Callable[[], nn.Module], strategies: list[str]
) -> None:
    model, data = built(make), rows()
    optimizer = sgd(model)
    for first in range(0, len(data), ROWS):
        values, targets = (torch.stack(part) for part in zip(*data[first : first + ROWS], strict=True))
        loss(model(values), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for states in run_ranks(trained, 2, make, strategies):
        for state in states:
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)


def test_unchanged_restores_weights_that_forward_changes() -> None:
    model = built(Taught)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memory = [p.data_ptr() for p in model.parameters()]

    with unchanged(model):
        model(batch()[0])
        for p in model.teacher.parameters():
            p.data = p.data * 2
    assert nbkit.check(model, "ddp", batch(), 2, loss=loss).ok

    assert [p.data_ptr() for p in model.parameters()] == memory
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Counted(nn.Module):
    """A model whose output depends on its number of calls, and on an attribute that others set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.calls, self.scale = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.late = getattr(self, "late", 0) + 1
        y: Tensor = self.blocks(x) * self.scale * (1 + 0.01 * (self.calls + self.late))
        return y


def test_unchanged_restores_attributes() -> None:
    class Keeping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.by_name, self.size = list[int](), dict[str, int](), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(1)
            self.by_name["called"] = 1
            self.size.add_(1)
            self.new = x
            return super().forward(x)

    model = built(lambda: nn.Sequential(Keeping()))
    seen, size = model[0].seen, model[0].size  # type: ignore[index]
    with unchanged(model):
        model(batch()[0])

    part: Any = model[0]  # type: ignore[index]
    assert part.seen is seen and not seen and part.by_name == {} and not hasattr(part, "new")
    assert part.size is size and size == 0


class Frozen(OrderedDict[str, int]):
    """A dict that cannot be changed once `done` is set, like a config of diffusers."""

    def __setitem__(self, key: str, value: int) -> None:
        if vars(self).get("done"):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


def test_unchanged_leaves_frozen_dicts_alone_and_removes_installed_hooks() -> None:
    class Installing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.config = Frozen(width=WIDTH)
            self.config.done = True  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "installed"):
                self.up.register_forward_hook(lambda part, args, y: y + 1)
                self.register_buffer("size", torch.ones(()))
                self.late, self.installed = nn.Identity(), True
            return super().forward(x)

    model: Any = built(lambda: nn.Sequential(Installing()))
    names = set(model.state_dict())
    with unchanged(model):
        output = model(batch()[0])
    assert dict(model[0].config) == {"width": WIDTH}
    assert not model[0].up._forward_hooks and not hasattr(model[0], "installed")
    assert set(model.state_dict()) == names and not hasattr(model[0], "late")
    assert torch.equal(model(batch()[0]), output) and len(model[0].up._forward_hooks) == 1


class Registering(Block):
    """A block that stores a size of its first batch in a buffer, which a checkpoint then has."""

    def forward(self, x: Tensor) -> Tensor:
        if "size" not in self._buffers:
            self.register_buffer("size", x.detach().abs().mean())
        return super().forward(x)


def test_a_buffer_registered_in_the_first_forward_is_refused_by_name() -> None:
    model = built(lambda: nn.Sequential(Registering(), Block()))
    for strategy in ("ddp", "zero3"):
        said = nbkit.check(model, strategy, batch(), 2, loss=F.mse_loss)
        assert not said.ok and "The first forward pass registers '0.size'" in str(said), str(said)


class Attending(nn.Module):
    """An attention with a norm of each head's queries, so each tp rank has a part of the norm's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)
        return x + self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """A model that skips its second block if `fewer` is set, and always its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
        self.unused, self.fewer = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks[0](x)
        return y if self.fewer else self.blocks[1](y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def dropped_losses(world: Any, chain: list[str]) -> list[float]:
    trainer = Trainer(
        model=lambda: built(Dropping),
        loss=F.mse_loss,
        optimizer=adam,
        data=rows(),
        batch_size=ROWS,
        loading=nbkit.Loading(shuffle=False),
        strategy=chain[0],
        log_dir=None,
        progress=False,
    )
    for strategy in chain:
        trainer.switch(strategy)
        for fewer in (False, True):
            trainer.model.fewer = fewer  # type: ignore[assignment]
            trainer.fit(2)
    return [record["loss"] for record in trainer.history]


def test_a_block_skipped_in_a_step_is_not_updated() -> None:
    model, data, wanted = built(Dropping), rows(), []
    optimizer = adam(model)
    for step in range(8):
        first = step % STEPS * ROWS
        values, targets = (torch.stack(part) for part in zip(*data[first : first + ROWS], strict=True))
        model.fewer = step % 4 > 1  # type: ignore[assignment]
        loss = F.mse_loss(model(values), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())

    for found in run_ranks(dropped_losses, 2, ["dp=1 tp=2", "zero2"]):
        assert found == pytest.approx(wanted, rel=1e-10)


def annealed(module: nn.Module, step: int) -> None:
    """Change a model between two steps, like a live cell."""
    module.scale = 1 + 0.1 * step  # type: ignore[assignment]
    module.blocks[1].up.training = step < STEPS  # type: ignore[index, union-attr]


def counted_losses(world: Any, strategies: list[str]) -> list[list[float]]:
    found = []
    for chain in strategies:
        first, *later = chain.split(" > ")
        trainer = Trainer(
            model=lambda: built(Counted),
            loss=F.mse_loss,
            optimizer=sgd,
            data=rows(),
            batch_size=ROWS,
            loading=nbkit.Loading(shuffle=False),
            strategy=first,
            log_dir=None,
            progress=False,
        )
        losses = []
        for strategy in [*[first] * STEPS, *later]:
            trainer.switch(strategy)
            losses += [record["loss"] for record in trainer.fit(1)]
            annealed(trainer.model, trainer.step)
        assert not trainer.model.blocks[1].up.training  # type: ignore[index, union-attr]
        found.append(losses)
    return found


def test_changed_attributes_of_a_model_are_kept_in_a_switch() -> None:
    model, data, wanted = built(Counted), rows(), []
    optimizer = sgd(model)
    for step in range(STEPS + 2):
        first = step % STEPS * ROWS
        values, targets = (torch.stack(part) for part in zip(*data[first : first + ROWS], strict=True))
        loss = F.mse_loss(model(values), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        annealed(model, step + 1)
        wanted.append(loss.item())

    for found in run_ranks(counted_losses, 2, ["ddp > zero3 > dp=1 tp=2", "zero3"]):
        assert found[0] == pytest.approx(wanted, rel=1e-10)
        assert found[1] == pytest.approx(wanted[:STEPS], rel=1e-10)


def test_buffers_that_depend_on_the_split_of_a_batch_are_refused_by_name() -> None:
    model = built(lambda: nn.Sequential(Counting(), Counting()))
    for strategy in ("pp", "dp=1 tp=2"):
        said = nbkit.check(model, strategy, batch(), 2, loss=F.mse_loss)
        assert said.ok == (strategy != "pp"), str(said)
        assert ("buffer '0.size'" in str(said)) == (strategy == "pp")


def halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_a_gradient_is_refused_with_the_name_of_its_parameter(late: bool) -> None:
    model = built(lambda: nn.Sequential(Block(), Block()))
    weight: Any = model[1].up.weight  # type: ignore[index]
    handle = weight.register_post_accumulate_grad_hook(halved) if late else weight.register_hook(torch.sign)
    for strategy in ("ddp", "zero1", "tp", "pp"):
        said = nbkit.check(model, strategy, batch(), 2, loss=F.mse_loss)
        assert not said.ok and "'1.up.weight' has a hook" in str(said), str(said)
    assert nbkit.check(model, "ddp", batch(), 1, loss=F.mse_loss).ok
    handle.remove()
    assert nbkit.check(model, "ddp", batch(), 2, loss=F.mse_loss).ok


class Skipping(nn.Module):
    """A model that skips blocks by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if random.random() < 0.5 else x
        return x


def test_draws_of_pythons_random_are_not_mistaken_for_coupled_rows() -> None:
    drawn = random.getstate()
    for _ in range(4):  # with unequal draws, two of three checks would differ
        said = nbkit.check(built(Skipping), "zero2", batch(), 2, loss=F.mse_loss)
        assert said.ok and "do not depend on the row" not in str(said), str(said)
    assert random.getstate() == drawn


class Filter(nn.Module):
    """A module with a weight for each frequency of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex128))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, n=x.shape[1], dim=1)
        return x + self.out(torch.tanh(kept))


def test_the_norm_of_complex_gradients_counts_both_parts() -> None:
    for strategy in ("ddp", "zero1", "pp"):
        said = nbkit.check(built(lambda: nn.Sequential(Filter(), Filter())), strategy, batch(), 2, loss=F.mse_loss)
        assert said.ok, str(said)
