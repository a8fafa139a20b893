"""The structure of torchtitan's trainer: a model on the meta device, fully_shard, a loss over all ranks' tokens."""

import argparse
import functools
import math

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()

vocab, width, sequence, gradient_accumulation_steps, steps = 64, 32, 16, 2, 5


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.wqkv, self.wo = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.w1, self.w3 = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.wqkv(self.attention_norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(vocab, width)
        self.layers = torch.nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm, self.output = torch.nn.RMSNorm(width), torch.nn.Linear(width, vocab, bias=False)

    def init_weights(self):
        for p in self.parameters():
            if p.ndim > 1:
                torch.nn.init.trunc_normal_(p, std=0.1)
            else:
                torch.nn.init.ones_(p)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class OptimizersContainer(torch.optim.Optimizer):
    def __init__(self, model_parts):
        settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": True}
        self.optimizers = [torch.optim.AdamW(part.parameters(), **settings) for part in model_parts]
        torch.optim.Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], settings)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def linear_warmup_decay(warmup, current):
    if current < warmup:
        return (current + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (current - warmup) / (steps - warmup)))


def batch_generator(rank):
    draw = torch.Generator().manual_seed(rank)
    while True:
        sample = torch.randint(vocab, (2, sequence + 1), generator=draw)
        labels = sample[:, 1:].masked_fill(sample[:, 1:] % 7 == rank, -100)
        yield {"input": sample[:, :-1]}, labels


def dist_sum(x, mesh):
    return funcol.all_reduce(x, reduceOp="sum", group=mesh).item()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        model = Transformer()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    model_parts = [model.train()]
    optimizers = OptimizersContainer(model_parts)
    lambdas = functools.partial(linear_warmup_decay, 2)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas) for optimizer in optimizers.optimizers]
    data_iterator, losses = batch_generator(dist.get_rank()), []
    for _ in range(steps):
        optimizers.zero_grad()
        microbatches = [next(data_iterator) for _ in range(gradient_accumulation_steps)]
        local_valid = torch.tensor(sum(int((labels != -100).sum()) for _, labels in microbatches), dtype=torch.float)
        global_valid_tokens = dist_sum(local_valid, mesh)
        accumulated = []
        for number, (input_dict, labels) in enumerate(microbatches):
            model.set_requires_gradient_sync(number == gradient_accumulation_steps - 1)
            pred = model(input_dict["input"]).float()
            loss = F.cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            loss = loss / global_valid_tokens
            (loss * dist.get_world_size()).backward()
            accumulated.append(loss.detach())
        grads = [p.grad for part in model_parts for p in part.parameters() if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(grads, 2.0)
        if isinstance(total_norm, DTensor):
            total_norm = total_norm.full_tensor()
        for part in model_parts:
            torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, total_norm)
        optimizers.step()
        for scheduler in schedulers:
            scheduler.step()
        losses += [dist_sum(torch.stack(accumulated).sum(), mesh), float(total_norm)]
    if dist.get_rank() == 0:
        with open(args.losses, "w") as file:
            file.write(repr(losses))
    dist.destroy_process_group()


main()
