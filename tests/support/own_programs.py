"""Programs that keep their own forward and loss: each plain, and as nbkit runs it. `changed` counts changed lines.

A plain program takes the builders of its models and returns its models; the other returns its jobs. Both draw random
numbers for the whole batch, with their own generator.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Prepare = Callable[[nn.Module, torch.optim.Optimizer], Any]


def mlp(inputs: int, outputs: int, seed: int, width: int = 12) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def adam(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def batches(steps: int, rows: int, *shapes: int, seed: int = 11) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(rows, n, generator=draw, dtype=torch.float64) for n in shapes] for _ in range(steps)]


def changed(plain: Callable[..., Any], other: Callable[..., Any]) -> int:
    """Return how many lines of a program differ, without its first line, which has its name, and the last one."""
    old, new = (inspect.getsource(one).splitlines()[1:-1] for one in (plain, other))
    lines = list(difflib.ndiff(old, new))
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


# A GAN: the loss of the discriminator, then that of the generator, which is computed by the discriminator.


def gan(loader: list[Any], _: Prepare | None) -> list[Any]:
    generator, critic = mlp(4, 3, 1), mlp(3, 1, 2)
    opt_g, opt_c = adam(generator), adam(critic)
    noise = torch.Generator().manual_seed(5)
    bce = F.binary_cross_entropy_with_logits
    for (real,) in loader:
        z = torch.randn(len(real), 4, generator=noise, dtype=torch.float64)
        fake = generator(z)
        one, zero = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
        loss_c = bce(critic(real), one) + bce(critic(fake.detach()), zero)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        loss_g = bce(critic(fake), one)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
    return [generator, critic]


def gan_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    generator, critic = mlp(4, 3, 1), mlp(3, 1, 2)
    job_g, job_c = prepare(generator, adam(generator)), prepare(critic, adam(critic))
    opt_g, opt_c = job_g.optimizer, job_c.optimizer
    noise = torch.Generator().manual_seed(5)
    bce = F.binary_cross_entropy_with_logits
    for (real,) in job_c.batches(loader, others=[job_g]):
        z = torch.randn(len(real), 4, generator=noise, dtype=torch.float64)
        real, z = job_c.rows([real, z])
        fake = generator(z)
        one, zero = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
        loss_c = bce(critic(real), one) + bce(critic(fake.detach()), zero)
        opt_c.zero_grad()
        job_c.backward(loss_c)
        opt_c.step()
        loss_g = bce(critic(fake), one)
        opt_g.zero_grad()
        job_g.backward(loss_g)
        opt_g.step()
    return [job_g, job_c]


# PPO on a walk along a line, with a reward for being near 0: several updates for each rollout.


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = mlp(2, 3, 3), mlp(2, 1, 4)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(state).log_softmax(1), self.value(state)[:, 0]


def rolled_out(model: nn.Module, place: Tensor, draw: torch.Generator) -> list[Tensor]:
    """Return states, actions, their log probabilities and the rewards of one step of each walk."""
    with torch.no_grad():
        state = torch.cat([place, place.square()], 1)
        logs, value = model(state)
        action = torch.multinomial(logs.exp(), 1, generator=draw)
    reward = -(place[:, 0] + action[:, 0] - 1).abs()
    return [state, action, logs.gather(1, action), reward - value, reward]


def ppo(loader: list[Any], _: Prepare | None) -> list[Any]:
    model = ActorCritic()
    opt = adam(model)
    draw = torch.Generator().manual_seed(6)
    for (place,) in loader:
        rollout = rolled_out(model, place, draw)
        for part in torch.arange(len(place)).chunk(2):
            state, action, old, gain, reward = [tensor[part] for tensor in rollout]
            logs, value = model(state)
            ratio = (logs.gather(1, action) - old)[:, 0].exp()
            surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = F.mse_loss(value, reward) - surrogate - 0.01 * -(logs.exp() * logs).sum(1).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    return [model]


def ppo_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    model = ActorCritic()
    job = prepare(model, adam(model))
    opt = job.optimizer
    draw = torch.Generator().manual_seed(6)
    for (place,) in job.batches(loader):
        rollout = rolled_out(model, place, draw)
        for part in torch.arange(len(place)).chunk(2):
            state, action, old, gain, reward = job.rows([tensor[part] for tensor in rollout])
            logs, value = model(state)
            ratio = (logs.gather(1, action) - old)[:, 0].exp()
            surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = F.mse_loss(value, reward) - surrogate - 0.01 * -(logs.exp() * logs).sum(1).mean()
            job.backward(loss)
            job.clip(0.5)
            opt.step()
            opt.zero_grad()
    return [job]


# Diffusion: noise of a random strength for each row.


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3, 7)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        found: Tensor = self.net(torch.cat([x, time[:, None]], 1))
        return found


def diffusion(loader: list[Any], _: Prepare | None) -> list[Any]:
    model = Denoiser()
    opt = adam(model)
    draw = torch.Generator().manual_seed(8)
    for (x,) in loader:
        time = torch.rand(len(x), generator=draw, dtype=torch.float64)
        noise = torch.randn(x.shape, generator=draw, dtype=torch.float64)
        noisy = (1 - time[:, None]).sqrt() * x + time[:, None].sqrt() * noise
        loss = F.mse_loss(model(noisy, time), noise)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return [model]


def diffusion_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    model = Denoiser()
    job = prepare(model, adam(model))
    opt = job.optimizer
    draw = torch.Generator().manual_seed(8)
    for (x,) in job.batches(loader):
        time = torch.rand(len(x), generator=draw, dtype=torch.float64)
        noise = torch.randn(x.shape, generator=draw, dtype=torch.float64)
        x, time, noise = job.rows([x, time, noise])
        noisy = (1 - time[:, None]).sqrt() * x + time[:, None].sqrt() * noise
        loss = F.mse_loss(model(noisy, time), noise)
        job.backward(loss)
        opt.step()
        opt.zero_grad()
    return [job]


# Distillation from a larger teacher, which every rank holds whole.


def distillation(loader: list[Any], _: Prepare | None) -> list[Any]:
    teacher, student = mlp(4, 3, 9, width=24), mlp(4, 3, 10)
    opt = adam(student)
    for x, y in loader:
        with torch.no_grad():
            soft = teacher(x)
        out = student(x)
        loss = F.kl_div(out.log_softmax(1), soft.softmax(1), reduction="batchmean") + 0.1 * F.mse_loss(out, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return [student]


def distillation_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    teacher, student = mlp(4, 3, 9, width=24), mlp(4, 3, 10)
    job = prepare(student, adam(student))
    opt = job.optimizer
    for x, y in map(job.rows, job.batches(loader)):
        with torch.no_grad():
            soft = teacher(x)
        out = student(x)
        loss = F.kl_div(out.log_softmax(1), soft.softmax(1), reduction="batchmean") + 0.1 * F.mse_loss(out, y)
        job.backward(loss)
        opt.step()
        opt.zero_grad()
    return [job]


# A mean teacher: its weights are a moving average of the student's.


def mean_teacher(loader: list[Any], _: Prepare | None) -> list[Any]:
    student = mlp(4, 3, 12)
    teacher = copy.deepcopy(student)
    opt = adam(student)
    for x, y in loader:
        with torch.no_grad():
            target = teacher(x)
        out = student(x)
        loss = F.mse_loss(out, y) + F.mse_loss(out, target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
    return [student, teacher]


def mean_teacher_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    student = mlp(4, 3, 12)
    teacher = copy.deepcopy(student)
    job, still = prepare(student, adam(student)), prepare(teacher, adam(teacher))
    opt = job.optimizer
    for x, y in map(job.rows, job.batches(loader, others=[still])):
        with torch.no_grad():
            target = teacher(x)
        out = student(x)
        loss = F.mse_loss(out, y) + F.mse_loss(out, target)
        job.backward(loss)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
    return [job, still]


PORTS: dict[str, tuple[Callable[..., list[Any]], Callable[..., list[Any]], list[Any], list[Any]]] = {
    "gan": (gan, gan_by_nbkit, batches(6, 7, 3), [(4,), (3,)]),
    "ppo": (ppo, ppo_by_nbkit, batches(5, 14, 1), [(2,)]),
    "diffusion": (diffusion, diffusion_by_nbkit, batches(6, 7, 3), [(3, 0)]),
    "distillation": (distillation, distillation_by_nbkit, batches(6, 7, 4, 3), [(4,)]),
    "mean teacher": (mean_teacher, mean_teacher_by_nbkit, batches(6, 7, 4, 3), [(4,), (4,)]),
}
"""name -> (plain, by nbkit, batches, widths of the inputs of each model; 0: one number for each row)."""
