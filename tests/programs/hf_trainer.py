"""The Trainer of transformers, which forms its own process group, evaluates and logs."""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()

set_seed(5)
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 97}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(97, (40, 16))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=5,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
if trainer.is_world_process_zero():
    with open(args.losses, "w") as file:
        file.write(repr(losses))
