"""Compare a step with experts spread over ranks with the expert parallelism of transformers.

The model is a small Qwen3-MoE of transformers. Both sides train it from the same weights on the same batches. Both give
each rank a part of the rows, and send each token to the ranks of its experts by an all-to-all.

The peer is `DistributedConfig(fsdp_size=4, ep_size=4)`. It shards all other weights by torch's `fully_shard`, as
`zero3 ep=4` does. It cannot replicate them, as `ep=4` does, so `ep=4` is compared with the same peer. `ep=4` is also
compared with nbkit's `zero3`, under which ranks gather the experts instead of sending tokens.

All use the fused AdamW, the default of the Trainer of transformers. The other AdamW makes ten operations for each
weight, which would cost the peer most, because its weights are DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import nbkit
from bench.rigs.forked import Ranks
from bench.rigs.jobs import data, token_loss, trainer
from bench.settings import Settings, shuffled
from bench.steps import steps
from bench.table import Row, compared, skipped
from verify.models.specimens import llama_sizes

RANKS, EXPERTS, CHOSEN = 4, 32, 4
SIZE = {"width": 256, "layers": 4, "block": 64, "batch": 16}
QUICK = {"width": 64, "layers": 2, "block": 32, "batch": 8}
STARTS, OF_ONE_START, STEPS = 3, 5, 4
PEER = "transformers, fsdp_size=4 ep_size=4"
PAIRS = (("zero3 ep=4", PEER, 1.0), ("ep=4", PEER, 1.0), ("ep=4", "zero3", None))
"""(strategy of nbkit, the arm beside it, bar)."""
EQUAL = 1e-3
"""Losses of two arms may differ by so much. The first updates of AdamW magnify rounding errors."""

Spent = list[tuple[float, float]]  # (CPU-seconds of all ranks, seconds) of a step, block by block


def run(settings: Settings) -> list[Row]:
    """Return two rows for each pair: CPU-seconds of all ranks, and wall seconds."""
    why = _without_peer()
    spent = _measure(
        settings, [*dict.fromkeys(arm for pair in PAIRS if not (why and PEER in pair) for arm in pair[:2])]
    )
    rows = []
    for ours, beside, bar in PAIRS:
        what = f"step, {ours}, {RANKS} ranks, {EXPERTS} experts a layer"
        if beside not in spent:
            rows.append(skipped(what, beside, why))
            continue
        for which, kind in enumerate(("CPU-seconds of all ranks", "seconds")):
            values, theirs, again = ([one[which] for one in spent[arm]] for arm in (ours, beside, f"{ours} again"))
            rows.append(compared(f"{what}, {kind}, {len(values)} pairs", values, beside, theirs, again, bar, "ms"))
    return rows


def _without_peer() -> str:
    """Return why the peer cannot run here; "" if it can."""
    import transformers
    from transformers.distributed import DistributedConfig

    has = any(field.name == "ep_size" for field in fields(DistributedConfig))
    return "" if has else f"version {transformers.__version__} cannot spread experts and rows over the same ranks"


def _measure(settings: Settings, arms: list[str]) -> dict[str, Spent]:
    """Return the times of each arm's blocks; "ARM again" is the second block of an arm of nbkit in each round."""
    size = QUICK if settings.quick else SIZE
    spent: dict[str, Spent] = {f"{arm}{again}": [] for arm in arms for again in ("", " again")}
    spent.pop(f"{PEER} again", None)
    for _ in range(settings.count(STARTS)):
        with ExitStack() as stack:
            jobs = {}
            for arm in arms:
                with_ = "torch" if arm == PEER else "nbkit"
                jobs[arm] = stack.enter_context(
                    Ranks("steps.experts", RANKS, folder=settings.folder, with_=with_, **size)
                )
                jobs[arm].ask("prepare", strategy=arm, microbatches=1)
            _check({arm: jobs[arm].ask("losses") for arm in arms})
            for order in shuffled(list(spent), settings.count(OF_ONE_START)):
                for name in order:
                    said = jobs[name.removesuffix(" again")].ask("spent", steps=STEPS)
                    spent[name].append((sum(cpu for _, cpu in said), max(wall for wall, _ in said)))
    return spent


def _check(losses: dict[str, list[list[float]]]) -> None:
    """Raise RuntimeError if the arms have different losses. losses: of the first steps, of each rank of each arm."""
    means = {arm: [mean(step) for step in zip(*of, strict=True)] for arm, of in losses.items()}
    first = next(iter(means.values()))
    if any(abs(loss - own) > EQUAL for of in means.values() for loss, own in zip(of, first, strict=True)):
        raise RuntimeError(f"losses of the first steps differ: {means}")


class Worker(steps.Worker):
    """A rank that trains a mixture of experts. with_: "nbkit", or "torch" for the peer."""

    def losses(self) -> list[float]:
        """Return the losses of the first two steps: of this rank's rows, or of all rows."""
        return self._losses()[:2]

    def _trainer(self, strategy: str, microbatches: int) -> Callable[[int], Any]:
        job = trainer(
            self._config,
            strategy,
            model=lambda: mixture(self._config),
            loss=lambda output, targets: token_loss(output.logits, targets),
            data=data(self._config, steps.ROWS * self._batch),
            batch=self._batch,
            optimizer=lambda model: _adamw(model.parameters()),
            loading=nbkit.Loading(collate=self._pace),
            log_dir=f"runs {strategy}",
        )
        self._losses: Callable[[], list[float]] = lambda: [record["loss"] for record in job.history]
        return job.fit

    def _script(self, strategy: str, microbatches: int) -> Callable[[int], Any]:
        from transformers import Qwen3MoeForCausalLM
        from transformers.distributed import DistributedConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if dist.get_rank() == 0:
            mixture(self._config).save_pretrained("mixture")
        dist.barrier()
        spread = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=dist.get_world_size())
        model = Qwen3MoeForCausalLM.from_pretrained("mixture", distributed_config=spread).train()
        named = list(model.named_parameters())
        # The fused AdamW takes no list of DTensors from both meshes.
        experts = [param for name, param in named if ".experts." in name]
        optimizer = _adamw([{"params": experts}, {"params": [p for name, p in named if ".experts." not in name]}])
        losses: list[Tensor] = []
        self._losses = lambda: [float(loss) for loss in losses]

        def step(ids: Tensor, targets: Tensor) -> None:
            loss = token_loss(model(ids).logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        return self._loop(step, dist.get_world_size(), dist.get_rank())


def mixture(of: nbkit.GPTConfig) -> nn.Module:
    """Return a model with the same weights whenever it is called."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = llama_sizes(of.layers, vocab_size=of.vocab, hidden_size=of.width, max_position_embeddings=of.block)
    heads = {"num_attention_heads": of.heads, "num_key_value_heads": of.heads // 2, "head_dim": of.width // of.heads}
    routed = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": of.width // 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | heads | routed)))  # type: ignore[no-any-return]


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, fused=True)
