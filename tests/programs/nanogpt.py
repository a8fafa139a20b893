"""The structure of nanoGPT's train.py: DDP, micro-steps, a scaler, clipping, evaluation, a cosine."""

import argparse
import math
import os
from contextlib import nullcontext

import torch
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
parser.add_argument("--max_iters", type=int, default=6)
args = parser.parse_args()

block_size, batch_size, vocab, width = 16, 4, 65, 32
gradient_accumulation_steps, eval_interval, grad_clip = 4, 3, 1.0
ddp = int(os.environ.get("RANK", -1)) != -1
assert ddp
init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + ddp_rank)
data = torch.randint(vocab, (4096,), generator=torch.Generator().manual_seed(0))


def get_batch():
    at = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[i : i + block_size] for i in at])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in at])
    return x, y


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = torch.nn.LayerNorm(width)
        self.attn = torch.nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        inner = torch.nn.Linear(width, 4 * width)
        self.mlp = torch.nn.Sequential(inner, torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        y = self.ln(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = torch.nn.ModuleDict(
            {
                "wte": torch.nn.Embedding(vocab, width),
                "wpe": torch.nn.Embedding(block_size, width),
                "h": torch.nn.ModuleList([Block() for _ in range(2)]),
            }
        )
        self.lm_head = torch.nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx, targets=None):
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1024.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
model = DistributedDataParallel(model)
raw_model = model.module
ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16)


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = torch.stack([raw_model(*get_batch())[1] for _ in range(3)]).mean()
    model.train()
    return found.item()


losses, iter_num = [], 0
X, Y = get_batch()
while True:
    lr = 1e-3 * 0.5 * (1 + math.cos(math.pi * iter_num / args.max_iters))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        losses.append(estimate_loss())
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        model.require_backward_grad_sync = last
        with nullcontext() if last else model.no_sync(), ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    mean = loss.detach().clone() * gradient_accumulation_steps
    all_reduce(mean)
    losses.append(mean.item() / ddp_world_size)
    iter_num += 1
    if iter_num >= args.max_iters:
        break
if master_process:
    with open(args.losses, "w") as file:
        file.write(repr(losses))
destroy_process_group()
