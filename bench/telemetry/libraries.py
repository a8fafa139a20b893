"""Programs that train one model, each with another library and without nbkit. `nbkit_*` use nbkit's Trainer.

torchrun --nproc-per-node 2 bench/telemetry/libraries.py ddp
torchrun --nproc-per-node 2 bench/telemetry/libraries.py trl profiled     # torch's profiler writes trace0.json, ...

The parts of a step are known: the model and the loader sleep, and rank 1 is late. All gradients are exchanged when the
whole backward pass is over, because nearly all parameters are in the first layer.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

DATA, FORWARD, BACKWARD, LATE = 0.08, 0.08, 0.16, 0.1
"""Seconds of a step. LATE: by how much the forward pass of rank 1 is longer."""
VOCAB, WIDTH, KINDS, TOKENS, ROWS = 1024, 256, 16, 8, 4
STEPS = 1_000_000  # until the program is ended
TRACED = 10, 30
"""The steps that torch's profiler records, if it is asked to."""


def sleeps(module: nn.Module, args: Any, output: Tensor) -> None:
    """Sleep for the forward pass, and later for the backward pass of the layers after `module`: a forward hook."""
    time.sleep(FORWARD + LATE * (os.environ["RANK"] == "1"))
    if output.requires_grad:
        output.register_hook(lambda grad: time.sleep(BACKWARD))


class Net(nn.Module):
    """A model of 1.3 MB that computes almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, KINDS)
        self.hidden.register_forward_hook(sleeps)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.embedding(input_ids)))
        return logits


def rows() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (4_096, TOKENS), generator=draw)
    return [{"input_ids": row, "labels": [token % KINDS for token in row]} for row in ids.tolist()]


def collate(of: list[dict[str, Any]]) -> dict[str, Tensor]:
    time.sleep(DATA)
    return {name: torch.as_tensor([row[name] for row in of]) for name in ("input_ids", "labels")}


def with_mask(of: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = collate(of)
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, loader: Any) -> None:
    optimizer = adamw(model)
    for _ in range(STEPS):
        for batch in loader:
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def ddp() -> None:
    dist.init_process_group("gloo")
    data = rows()
    loader = DataLoader(data, ROWS, sampler=DistributedSampler(data), collate_fn=collate)  # type: ignore[arg-type]
    train(nn.parallel.DistributedDataParallel(Net()), loader)


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("cpu:gloo")
    model, data = Net(), rows()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
    train(model, DataLoader(data, ROWS, sampler=DistributedSampler(data), collate_fn=collate))  # type: ignore[arg-type]


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, adamw(net), DataLoader(rows(), ROWS, collate_fn=collate))  # type: ignore[arg-type]
    for _ in range(STEPS):
        for batch in loader:
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def lightning() -> None:
    import lightning as library

    class Module(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return loss_of(self.net(batch["input_ids"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = library.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, **quiet)
    trainer.fit(Module(), DataLoader(rows(), ROWS, collate_fn=collate))  # type: ignore[arg-type]


def _llama() -> Any:
    """Return a model of transformers that is as large as `Net`."""
    import transformers

    sizes = {"intermediate_size": 68, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    model.model.norm.register_forward_hook(sleeps)
    return model


_ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": ROWS,
    "max_steps": STEPS,
    "logging_steps": 1_000,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def hf_trainer() -> None:
    import transformers

    arguments = transformers.TrainingArguments(**_ARGUMENTS)
    model = _llama()
    transformers.Trainer(model=model, args=arguments, train_dataset=rows(), data_collator=with_mask).train()  # type: ignore[arg-type]


def trl() -> None:
    import datasets
    import tokenizers
    import transformers
    import trl as library

    words = tokenizers.models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="1")
    tokenizer.pad_token = "0"
    library.SFTTrainer(
        model=_llama(),
        args=library.SFTConfig(
            **_ARGUMENTS, dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=False
        ),
        train_dataset=datasets.Dataset.from_list(rows()),
        data_collator=with_mask,
        processing_class=tokenizer,
    ).train()


def nbkit_ddp() -> None:
    import nbkit

    nbkit.Trainer(
        model=Net,
        loss=lambda logits, batch: loss_of(logits, batch["labels"]),
        optimizer=adamw,
        data=rows(),
        inputs=["input_ids"],
        batch_size=ROWS * int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        loading=nbkit.Loading(collate=collate),
        compute=nbkit.Compute(grad_norm_every=STEPS),
        progress=False,
    ).fit(STEPS)


def profile() -> None:
    """Let torch's profiler write a trace of some steps into the current folder: TRACED[0] to TRACED[1]."""
    profiler, count = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), itertools.count(1)

    def after(*_: Any) -> None:
        number = next(count)
        if number == TRACED[0]:
            profiler.start()
        elif number == TRACED[1]:
            profiler.stop()
            profiler.export_chrome_trace("part" + (name := f"trace{os.environ['RANK']}.json"))
            os.rename("part" + name, name)

    register_optimizer_step_post_hook(after)  # type: ignore[arg-type]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:] == ["profiled"]:
        profile()
    globals()[sys.argv[1]]()
