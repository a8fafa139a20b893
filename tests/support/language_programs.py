"""Programs with the structure of current language-model trainings, each plain and as nbkit runs it.

They are ports as in own_programs.py, with tokens. A batch is a micro-batch; several of them make a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from own_programs import Prepare
from torch import Tensor, nn
from torch.nn import functional as F

embedding = torch.float64
"""The dtype of nanochat's embedding. Elsewhere than in tests it has 16 bits."""

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, ACCUMULATION = 48, 12, 16, 2, 4, 2


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features of (rows, positions, heads, features) by their positions."""
    half = x.shape[-1] // 2
    turn = torch.arange(x.shape[1])[:, None] * 100.0 ** -torch.linspace(0, 1, half, dtype=x.dtype)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    first, second = x.split(half, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five steps of Newton and Schulz."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if tall else x
                p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def tokens(steps: int, rows: int, seed: int = 21) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(VOCAB, (rows, LENGTH + 1), generator=draw) for _ in range(steps * ACCUMULATION)]
    return [[each[:, :-1], each[:, 1:]] for each in ids]


# nanochat's base_train: norms without weights, norms of queries and keys, squared relu, capped logits, an embedding
# that may have 16 bits, AdamW for embedding and head, Muon for the matrices, rates and momentum set in each step.


class ChatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v = (linear(WIDTH, WIDTH) for _ in range(3))
        self.c_proj, self.c_fc, self.c_down = linear(WIDTH, WIDTH), linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.c_q, self.c_k, self.c_v))
        q, k = norm(rotated(q)), norm(rotated(k))
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_down(F.relu(self.c_fc(norm(x))).square())


class Chat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCAB, WIDTH), linear(WIDTH, VOCAB)
        self.h = nn.ModuleList([ChatBlock() for _ in range(LAYERS)])

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = norm(self.wte(idx).to(self.lm_head.weight.dtype))
        for block in self.h:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(norm(x)) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def chat() -> nn.Module:
    torch.manual_seed(31)
    model = Chat().double()
    model.wte.to(dtype=embedding)
    return model


def chat_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    adamw = [{"params": model.lm_head.parameters(), "lr": 0.004}, {"params": model.wte.parameters(), "lr": 0.02}]
    made = [torch.optim.AdamW(adamw, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0), Muon(model.h.parameters())]
    for group in (group for opt in made for group in opt.param_groups):
        group["initial_lr"] = group["lr"]
    return made


def lr_multiplier(step: int, steps: int = 8) -> float:
    return min((step + 1) / 3, 1.0, (steps - step) / 4)


def nanochat(loader: list[Any], _: Prepare | None) -> list[Any]:
    model = chat()
    optimizers = chat_optimizers(model)
    step, smooth = 0, 0.0
    for micro_step, (x, y) in enumerate(loader):
        loss = model(x, y)
        train_loss = loss.detach()
        loss = loss / ACCUMULATION
        loss.backward()
        if (micro_step + 1) % ACCUMULATION:
            continue
        for group in (group for opt in optimizers for group in opt.param_groups):
            group["lr"] = group["initial_lr"] * lr_multiplier(step)
        for group in optimizers[1].param_groups:
            group["momentum"] = 0.85 + 0.1 * min(step / 4, 1)
        for opt in optimizers:
            opt.step()
        model.zero_grad(set_to_none=True)
        step, smooth = step + 1, 0.9 * smooth + 0.1 * float(train_loss)
    return [model]


def nanochat_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    model = chat()
    optimizers = chat_optimizers(model)
    job = prepare(model, optimizers)  # type: ignore[arg-type]
    step, smooth = 0, 0.0
    for micro_step, (x, y) in enumerate(map(job.rows, job.batches(loader))):
        loss = model(x, y)
        train_loss = loss.detach()
        loss = loss / ACCUMULATION
        job.backward(loss)
        if (micro_step + 1) % ACCUMULATION:
            continue
        for group in (group for opt in optimizers for group in opt.param_groups):
            group["lr"] = group["initial_lr"] * lr_multiplier(step)
        for group in optimizers[1].param_groups:
            group["momentum"] = 0.85 + 0.1 * min(step / 4, 1)
        job.optimizer.step()
        job.optimizer.zero_grad()
        step, smooth = step + 1, 0.9 * smooth + 0.1 * float(train_loss)
    return [job]


# modded-nanogpt: embeddings that are added to the values, learned mixes with the first hidden states, skips from the
# first half of the layers to the second, output matrices that begin at zero, and Adam for all that is not a matrix.


class ModdedBlock(nn.Module):
    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH) if attends else None
        self.out = linear(WIDTH, WIDTH) if attends else None
        self.c_fc, self.c_proj = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        self.lambdas, self.mix = nn.Parameter(torch.tensor([1.0, 0.0])), nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x: Tensor, value: Tensor | None, x0: Tensor) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.qkv is not None and self.out is not None:
            q, k, v = self.qkv(norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
            v = self.mix[0] * v + (0 if value is None else self.mix[1] * value.view_as(v))
            q, k = rotated(norm(q)), rotated(norm(k))
            y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.c_proj(F.relu(self.c_fc(norm(x))).square())


class Modded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, WIDTH), linear(WIDTH, VOCAB)
        self.value_embeds = nn.ModuleList([nn.Embedding(VOCAB, WIDTH) for _ in range(2)])
        self.blocks = nn.ModuleList([ModdedBlock(attends=i != 2) for i in range(LAYERS)])
        self.skip_weights = nn.Parameter(torch.ones(LAYERS // 2))
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "c_proj.weight", "lm_head.weight")):
                nn.init.normal_(p, std=1e-3)

    def forward(self, input_seq: Tensor, target_seq: Tensor) -> Tensor:
        values = [embed(input_seq) for embed in self.value_embeds]
        values = [values[0], *[None] * (LAYERS - 2), values[1]]  # type: ignore[list-item]
        x = x0 = norm(self.embed(input_seq))
        skips: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= LAYERS // 2:
                x = x + self.skip_weights[i - LAYERS // 2] * skips.pop()
            x = block(x, values[i], x0)
            if i < LAYERS // 2:
                skips.append(x)
        logits = 30 * torch.sigmoid(self.lm_head(norm(x)) / 7.5)
        return F.cross_entropy(logits.flatten(0, 1), target_seq.flatten())


def modded() -> nn.Module:
    torch.manual_seed(33)
    return Modded().double()


def modded_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2]
    embeds = [*model.embed.parameters(), *model.value_embeds.parameters()]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [model.lm_head.weight], "lr": 0.01},
        {"params": embeds, "lr": 0.03},
        {"params": scalars, "lr": 0.02},
    ]
    return [torch.optim.Adam(groups, betas=(0.8, 0.95), eps=1e-10, fused=True), Muon(matrices, lr=0.05)]


def modded_nanogpt(loader: list[Any], _: Prepare | None) -> list[Any]:
    model = modded()
    optimizers = modded_optimizers(model)
    _, optimizer2 = optimizers
    schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, lr_multiplier) for opt in optimizers]
    for step, (inputs, targets) in enumerate(loader):
        model(inputs, targets).backward()
        for group in optimizer2.param_groups:
            frac = min(step / 6, 1)
            group["momentum"] = (1 - frac) * 0.85 + frac * 0.95
        for opt in optimizers:
            opt.step()
        for sched in schedulers:
            sched.step()
        model.zero_grad(set_to_none=True)
    return [model]


def modded_nanogpt_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    model = modded()
    optimizers = modded_optimizers(model)
    _, optimizer2 = optimizers
    schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, lr_multiplier) for opt in optimizers]
    job = prepare(model, optimizers)  # type: ignore[arg-type]
    for step, (inputs, targets) in enumerate(map(job.rows, job.batches(loader))):
        job.backward(model(inputs, targets))
        for group in optimizer2.param_groups:
            frac = min(step / 6, 1)
            group["momentum"] = (1 - frac) * 0.85 + frac * 0.95
        job.optimizer.step()
        for sched in schedulers:
            sched.step()
        job.optimizer.zero_grad()
    return [job]


# torchtitan's loop: the loss of all micro-batches is a sum over the tokens that count, divided by their number.


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm, self.output = (
            nn.Embedding(VOCAB, WIDTH),
            nn.RMSNorm(WIDTH),
            linear(WIDTH, VOCAB),
        )
        self.layers = nn.ModuleDict({str(i): ChatBlock() for i in range(LAYERS)})

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        found: Tensor = self.output(self.norm(h))
        return found


def titan() -> nn.Module:
    torch.manual_seed(35)
    return Titan().double()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def valid(batches: Sequence[Any]) -> int:
    return sum(int((labels != -100).sum()) for _, labels in batches)


def masked(steps: int, rows: int) -> list[list[Tensor]]:
    """Return tokens and labels. The labels of each row's prompt do not count; prompts have different lengths."""
    made = tokens(steps, rows, seed=22)
    return [[ids, labels.masked_fill(torch.arange(LENGTH) < ids[:, :1] % 7 + 1, -100)] for ids, labels in made]


def warmup_cosine(step: int) -> float:
    return (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 6))


def torchtitan(loader: list[Any], _: Prepare | None) -> list[Any]:
    model = titan()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
    for micro_step, (inputs, labels) in enumerate(loader):
        first = micro_step - micro_step % ACCUMULATION
        global_valid_tokens = valid(loader[first : first + ACCUMULATION])
        loss = summed_loss(model(inputs), labels) / global_valid_tokens
        loss.backward()
        if micro_step - first == ACCUMULATION - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [model]


def torchtitan_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    model = titan()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
    job = prepare(model, optimizer)
    for micro_step, (inputs, labels) in enumerate(map(job.rows, job.batches(loader))):
        first = micro_step - micro_step % ACCUMULATION
        global_valid_tokens = valid(loader[first : first + ACCUMULATION])
        loss = summed_loss(model(inputs), labels) / global_valid_tokens
        job.backward(loss, reduction="sum")
        if micro_step - first == ACCUMULATION - 1:
            job.clip(0.3)
            job.optimizer.step()
            scheduler.step()
            job.optimizer.zero_grad()
    return [job]


# An SFT loop as in TRL: several examples packed into a row, positions that start again in each of them, and labels of
# the answers only. The loss is the mean over the labels that count.


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(37)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes, **heads, use_cache=False)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).double().train()


def packed(steps: int, rows: int) -> list[dict[str, Tensor]]:
    """Return rows of concatenated examples: token ids, positions in their example, and labels."""
    draw, made = torch.Generator().manual_seed(23), []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (rows, LENGTH), generator=draw)
        cut = torch.randint(3, LENGTH - 3, (rows, 1), generator=draw)
        at = torch.arange(LENGTH)
        positions = torch.where(at < cut, at, at - cut)
        labels = ids.masked_fill(positions < 2, -100)
        made.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return made


def sft(loader: list[Any], _: Prepare | None) -> list[Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs in loader:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        num_items = (labels != -100).sum()
        loss = summed_loss(logits, labels) / num_items
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def sft_by_nbkit(loader: list[Any], prepare: Prepare) -> list[Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = prepare(model, optimizer)
    for inputs in map(job.rows, job.batches(loader)):
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        num_items = (labels != -100).sum()
        loss = summed_loss(logits, labels) / num_items
        job.backward(loss, weight=num_items)
        job.clip(1.0)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [job]


def copied(batches: list[Any]) -> list[Any]:
    """Return a copy of the batches, because programs remove items from theirs."""
    return [dict(batch) if isinstance(batch, dict) else list(batch) for batch in batches]


Port = tuple[Callable[..., list[Any]], Callable[..., list[Any]], list[Any]]
PORTS: dict[str, Port] = {
    "nanochat": (nanochat, nanochat_by_nbkit, tokens(8, 6)),
    "modded-nanogpt": (modded_nanogpt, modded_nanogpt_by_nbkit, tokens(4, 6)),
    "torchtitan": (torchtitan, torchtitan_by_nbkit, masked(8, 6)),
    "sft": (sft, sft_by_nbkit, packed(8, 6)),
}
"""name -> (plain, by nbkit, batches)."""
