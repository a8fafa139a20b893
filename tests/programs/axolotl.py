"""Fine-tuning as in axolotl: a configuration becomes arguments of the Trainer of transformers, with adapters."""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
args = parser.parse_args()

config = {
    "base_model_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    "sequence_len": 16,
    "adapter": "lora",
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
    "train_on_inputs": False,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "learning_rate": 5e-3,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "group_by_length": False,
    "seed": 42,
}


def tokenized(count):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(64, (config["sequence_len"],), generator=draw)
        labels = ids.clone()
        if not config["train_on_inputs"]:
            labels[: int(ids[0] % 8)] = -100
        yield {"input_ids": ids, "labels": labels}


set_seed(config["seed"])
base = LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **config["base_model_config"])
lora = LoraConfig(r=config["lora_r"], target_modules=config["lora_target_modules"], init_lora_weights=False)
model = get_peft_model(LlamaForCausalLM(base), lora)
model.enable_input_require_grads()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=config["micro_batch_size"],
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        max_steps=config["max_steps"],
        optim=config["optimizer"],
        lr_scheduler_type=config["lr_scheduler"],
        learning_rate=config["learning_rate"],
        warmup_steps=config["warmup_steps"],
        weight_decay=config["weight_decay"],
        max_grad_norm=config["max_grad_norm"],
        bf16=config["bf16"],
        gradient_checkpointing=config["gradient_checkpointing"],
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=config["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=list(tokenized(64)))
    trainer.train()
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
if trainer.is_world_process_zero():
    with open(args.losses, "w") as file:
        file.write(repr(losses))
