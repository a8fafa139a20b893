"""The structure of TRL's SFTTrainer: examples packed into rows, labels of answers only, the tokens of all ranks."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()

vocab, max_length, accumulation = 64, 24, 2


def examples(count):
    draw = torch.Generator().manual_seed(4)
    for _ in range(count):
        prompt, answer = torch.randint(2, 7, (2,), generator=draw).tolist()
        ids = torch.randint(vocab, (prompt + answer,), generator=draw)
        yield {"input_ids": ids.tolist(), "completion_mask": [0] * prompt + [1] * answer}


def pack(every):
    """Fill rows with examples, best fit first."""
    rows = []
    for one in sorted(every, key=lambda one: -len(one["input_ids"])):
        size = len(one["input_ids"])
        fits = [row for row in rows if sum(len(each["input_ids"]) for each in row) + size <= max_length]
        if fits:
            max(fits, key=lambda row: sum(len(each["input_ids"]) for each in row)).append(one)
        else:
            rows.append([one])
    return rows


def collate(rows):
    found = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        ids = [token for each in row for token in each["input_ids"]]
        mask = [kept for each in row for kept in [0, *each["completion_mask"][1:]]]
        positions = [at for each in row for at in range(len(each["input_ids"]))]
        pad = max_length - len(ids)
        found["input_ids"].append(ids + [0] * pad)
        found["position_ids"].append(positions + list(range(pad)))
        found["labels"].append([i if kept else -100 for i, kept in zip(ids, mask, strict=True)] + [-100] * pad)
    return {key: torch.tensor(value) for key, value in found.items()}


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
set_seed(8)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_key_value_heads=1, use_cache=False, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
loader = torch.utils.data.DataLoader(pack(examples(96)), batch_size=2, shuffle=True, collate_fn=collate)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 20)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses, steps, batches = [], 0, iter(loader)
while steps < 4:
    group = [next(batches) for _ in range(accumulation)]
    own = sum((each["labels"][:, 1:] != -100).sum() for each in group)
    num_items_in_batch = accelerator.gather(own).sum()
    total = torch.zeros(())
    for number, inputs in enumerate(group):
        last = number == len(group) - 1
        with torch.enable_grad() if last else accelerator.no_sync(model):
            labels = inputs.pop("labels")[:, 1:]
            logits = model(**inputs).logits[:, :-1].float()
            summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            loss = summed / num_items_in_batch
            (loss * accelerator.num_processes).backward()
        total += loss.detach()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses += [accelerator.reduce(total, "sum").item(), float(norm)]
    steps += 1
if accelerator.is_main_process:
    with open(args.losses, "w") as file:
        file.write(repr(losses))
accelerator.end_training()
