"""The structure of modded-nanogpt: Muon gathers flat updates, fused Adam for the rest, value embeddings."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()

vocab, width, heads, layers, sequence, steps = 64, 32, 2, 4, 32, 6
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo")
dist.barrier()


@torch.no_grad()
def zeropower_via_newtonschulz5(g, steps):
    x = g.bfloat16()
    if g.size(-2) > g.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.mT if g.size(-2) > g.size(-1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size
        groups = []
        params = list(params)
        for size in sorted({p.numel() for p in params}):
            buffer = torch.empty(world_size, size, dtype=torch.bfloat16)
            of_size = [p for p in params if p.numel() == size]
            views = [buffer[i] for i in range(world_size)]
            groups.append({"params": of_size, "update_buffer": buffer, "update_buffer_views": views})
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            buffer, views, params = group["update_buffer"], group["update_buffer_views"], group["params"]
            handle, world = None, []

            def update_prev(handle, world, group=group, views=views):
                handle.wait()
                for p, flat in zip(world, views, strict=False):
                    p.add_(flat.view_as(p), alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)

            for base in range(0, len(params), self.world_size):
                if base + self.rank < len(params):
                    p = params[base + self.rank]
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    g = p.grad.lerp_(momentum, group["momentum"])
                    g = zeropower_via_newtonschulz5(g, 5).flatten()
                else:
                    g = views[self.rank].clone()
                if base > 0:
                    update_prev(handle, world)
                handle = dist.all_gather_into_tensor(buffer.view(-1), g.contiguous(), async_op=True)
                world = params[base : base + self.world_size]
            update_prev(handle, world)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attends = layer != 2
        self.qkv_w = torch.nn.Parameter(0.1 * torch.randn(3 * width, width)) if self.attends else None
        self.c_proj = torch.nn.Linear(width, width, bias=False) if self.attends else None
        self.c_fc = torch.nn.Linear(width, 4 * width, bias=False)
        self.c_out = torch.nn.Linear(4 * width, width, bias=False)
        self.c_out.weight.detach().zero_()
        self.lambdas = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
        self.mix = torch.nn.Parameter(torch.tensor([0.5, 0.5])) if self.attends else None

    def forward(self, x, ve, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attends:
            q, k, v = F.linear(norm(x), self.qkv_w).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            v = self.mix[0] * v
            if ve is not None:
                v = v + self.mix[1] * ve.view(*x.shape[:2], heads, -1).transpose(1, 2)
            y = F.scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.value_embeds = torch.nn.ModuleList([torch.nn.Embedding(vocab, width) for _ in range(2)])
        self.blocks = torch.nn.ModuleList([Block(i) for i in range(layers)])
        self.skip_weights = torch.nn.Parameter(torch.ones(layers // 2))
        self.lm_head = torch.nn.Linear(width, vocab, bias=False)
        self.lm_head.weight.detach().zero_()

    def forward(self, input_seq, target_seq):
        ve = [embed(input_seq) for embed in self.value_embeds]
        ve = [ve[0], *[None] * (layers - 2), ve[1]]
        x = x0 = norm(self.embed(input_seq)[None].float())
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= layers // 2:
                x = x + self.skip_weights[i - layers // 2] * skips.pop()
            x = block(x, ve[i], x0)
            if i < layers // 2:
                skips.append(x)
        logits = self.lm_head(norm(x))
        logits = 30 * torch.sigmoid(logits / 7.5)
        return F.cross_entropy(logits.view(-1, vocab), target_seq)


def distributed_data_generator(batch_size):
    tokens, pos = torch.randint(vocab, (8192,), generator=torch.Generator().manual_seed(rank // world_size)), 0
    local = batch_size // world_size
    while True:
        buf = tokens[pos + rank * local :][: local + 1]
        yield buf[:-1], buf[1:]
        pos += batch_size


torch.manual_seed(7)
model = GPT()
model.embed.bfloat16()
for p in model.parameters():
    dist.broadcast(p.detach(), 0)
hidden_matrix_params = [p for n, p in model.blocks.named_parameters() if p.ndim >= 2]
embed_params = [p for n, p in model.named_parameters() if "embed" in n]
scalar_params = [p for p in model.parameters() if p.ndim < 2]
adam_params = [
    {"params": [model.lm_head.weight], "lr": 0.02},
    {"params": embed_params, "lr": 0.06},
    {"params": scalar_params, "lr": 0.04},
]
optimizer1 = torch.optim.Adam(adam_params, betas=(0.8, 0.95), eps=1e-10, fused=True)
optimizer2 = Muon(hidden_matrix_params, lr=0.05, momentum=0.95, rank=rank, world_size=world_size)
optimizers = [optimizer1, optimizer2]
for group in (group for opt in optimizers for group in opt.param_groups):
    group["initial_lr"] = group["lr"]
train_loader, losses = distributed_data_generator(world_size * sequence), []
for step in range(steps):
    inputs, targets = next(train_loader)
    loss = model(inputs, targets)
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    for group in (group for opt in optimizers for group in opt.param_groups):
        group["lr"] = group["initial_lr"] * min((steps - step) / 3, 1)
    for group in optimizer2.param_groups:
        frac = min(step / 300, 1)
        group["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world_size)
if rank == 0:
    with open(args.losses, "w") as file:
        file.write(repr(losses))
dist.destroy_process_group()
