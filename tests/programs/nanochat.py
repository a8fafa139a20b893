"""The structure of nanochat's base_train: its own AdamW and Muon shard their updates, bf16 embeddings, accumulation."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
parser.add_argument("--num_iterations", type=int, default=5)
args = parser.parse_args()

vocab, width, heads, sequence, device_batch_size, total_batch_size = 64, 32, 2, 16, 2, 128
dist.init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
grad_accum_steps = total_batch_size // (device_batch_size * sequence * ddp_world_size)
torch.manual_seed(42)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c_qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.c_proj = torch.nn.Linear(width, width, bias=False)
        self.c_fc = torch.nn.Linear(width, 4 * width, bias=False)
        self.c_down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.c_qkv(norm(x)).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_down(F.relu(self.c_fc(norm(x))).square())


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = torch.nn.ModuleDict(
            {"wte": torch.nn.Embedding(vocab, width), "h": torch.nn.ModuleList([Block() for _ in range(3)])}
        )
        self.lm_head = torch.nn.Linear(width, vocab, bias=False)
        self.transformer.wte.to(dtype=torch.bfloat16)

    def forward(self, idx, targets):
        x = norm(self.transformer.wte(idx).float())
        for block in self.transformer.h:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(norm(x)).float() / 15)
        return F.cross_entropy(logits.view(-1, vocab), targets.view(-1))

    def setup_optimizers(self):
        groups = [
            {"params": list(self.lm_head.parameters()), "lr": 0.004},
            {"params": list(self.transformer.wte.parameters()), "lr": 0.2},
        ]
        optimizers = [DistAdamW(groups), DistMuon(self.transformer.h.parameters())]
        for group in (group for opt in optimizers for group in opt.param_groups):
            group["initial_lr"] = group["lr"]
        return optimizers


class DistAdamW(torch.optim.Optimizer):
    """AdamW as in ZeRO 2: each rank updates a slice of the rows of each parameter."""

    def __init__(self, groups):
        super().__init__(groups, {"betas": (0.8, 0.95), "eps": 1e-10})

    @torch.no_grad()
    def step(self):
        params, reduced, gathered = [p for group in self.param_groups for p in group["params"]], [], []
        for p in params:
            grad_slice = torch.empty_like(p.grad[: len(p) // ddp_world_size])
            work = dist.reduce_scatter_tensor(grad_slice, p.grad, op=dist.ReduceOp.SUM, async_op=True)
            reduced.append((work, grad_slice))
        rates = [group["lr"] for group in self.param_groups for _ in group["params"]]
        for p, lr, (work, grad_slice) in zip(params, rates, reduced, strict=True):
            work.wait()
            grad_slice /= ddp_world_size
            size = len(grad_slice)
            own = p[ddp_rank * size : (ddp_rank + 1) * size]
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            m = state.setdefault("m", torch.zeros_like(own)).lerp_(grad_slice, 0.2)
            v = state.setdefault("v", torch.zeros_like(own)).lerp_(grad_slice.square(), 0.05)
            scale = lr / (1 - 0.8 ** state["step"])
            own.sub_(scale * m / ((v / (1 - 0.95 ** state["step"])).sqrt() + 1e-10))
            gathered.append(dist.all_gather_into_tensor(p, own.clone(), async_op=True))
        for work in gathered:
            work.wait()


class DistMuon(torch.optim.Optimizer):
    """Muon in which each rank updates every n-th matrix of a shape, and sends it to the others."""

    def __init__(self, params):
        params = list(params)
        shapes = sorted({p.shape for p in params})
        groups = [{"params": [p for p in params if p.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            for base in range(0, len(params), ddp_world_size):
                some = params[base : base + ddp_world_size]
                padded = [p.grad for p in some] + [torch.zeros_like(some[0])] * (ddp_world_size - len(some))
                grad = torch.empty_like(padded[0])
                dist.reduce_scatter_tensor(grad, torch.cat(padded))
                own = torch.zeros_like(grad)
                if ddp_rank < len(some):
                    own = some[ddp_rank]
                    buffer = self.state[own].setdefault("momentum_buffer", torch.zeros_like(own))
                    grad /= ddp_world_size
                    buffer.lerp_(grad, 1 - group["momentum"])
                    own.sub_(group["lr"] * orthogonal(grad.lerp(buffer, group["momentum"])))
                every = [torch.empty_like(own) for _ in range(ddp_world_size)]
                dist.all_gather(every, own.clone())
                for p, new in zip(some, every, strict=False):
                    p.copy_(new)


def orthogonal(x):
    x = x.bfloat16() / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.float()


def batches():
    data, at = torch.randint(vocab, (8192,), generator=torch.Generator().manual_seed(0)), 0
    size = device_batch_size * sequence
    while True:
        own = data[at + ddp_rank * size : at + (ddp_rank + 1) * size + 1]
        yield own[:-1].view(-1, sequence), own[1:].view(-1, sequence)
        at += ddp_world_size * size


def get_lr_multiplier(it):
    return 1.0 if it < 3 else (args.num_iterations - it) / (args.num_iterations - 3 + 1)


model = GPT()
adamw_optimizer, muon_optimizer = optimizers = model.setup_optimizers()
train_loader, losses = batches(), []
x, y = next(train_loader)
for step in range(args.num_iterations):
    for _ in range(grad_accum_steps):
        loss = model(x, y)
        train_loss = loss.detach()
        loss = loss / grad_accum_steps
        loss.backward()
        x, y = next(train_loader)
    lrm = get_lr_multiplier(step)
    for group in (group for opt in optimizers for group in opt.param_groups):
        group["lr"] = group["initial_lr"] * lrm
    for group in muon_optimizer.param_groups:
        group["momentum"] = 0.85 + 0.1 * min(step / 300, 1)
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    dist.all_reduce(train_loss)
    losses.append(train_loss.item() / ddp_world_size)
if ddp_rank == 0:
    with open(args.losses, "w") as file:
        file.write(repr(losses))
dist.destroy_process_group()
