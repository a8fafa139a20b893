"""A small GPT on Python's own source: the Trainer call that a notebook cell makes, as a script.

python examples/train_gpt.py --steps 20
torchrun --nproc-per-node 2 examples/train_gpt.py --steps 20
"""

from __future__ import annotations

import argparse

import torch

import nbkit
from nbkit.rank.models.text import bigram_bits_per_byte, bits_per_byte, token_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="global: over all ranks")
    parser.add_argument("--text", help="a text file; default: the standard library's source")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="write a checkpoint here at the end")
    asked = parser.parse_args()

    train = nbkit.TextDataset(asked.text, block=128)
    heldout = nbkit.TextDataset(asked.text, block=128, split="heldout")
    trainer = nbkit.Trainer(
        model=lambda: nbkit.GPT(nbkit.GPTConfig(block=128)),
        loss=token_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=train,
        batch_size=asked.batch_size,
        strategy="ddp",
        clip_norm=1.0,
        seed=asked.seed,
    )
    trainer.fit(steps=asked.steps)

    small = torch.utils.data.Subset(heldout, range(0, len(heldout), max(1, len(heldout) // 256)))
    learned = bits_per_byte(trainer.evaluate(small))
    if trainer.job.rank == 0:
        print(f"held out: {learned:.3f} bits per byte; a byte bigram: {bigram_bits_per_byte(train, heldout):.3f}")
        print(trainer.model.generate("def ", 120).decode(errors="replace"))
        print(f"TensorBoard: tensorboard --logdir {trainer.run_dir}")
    if asked.save:
        trainer.save(asked.save)


if __name__ == "__main__":
    main()
