"""A loop with Accelerate: prepare, accumulate, clip_grad_norm_, gather_for_metrics; and its notebook_launcher."""

import argparse

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
parser.add_argument("--notebook_launcher", type=int, default=0)
args = parser.parse_args()


def train(path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(50)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics((model(x).argmax(-1), y)) for x, y in loader]
        losses.append(sum((found == wanted).sum().item() for found, wanted in right))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(path, "w") as file:
            file.write(repr(losses))
    accelerator.end_training()


if args.notebook_launcher:
    notebook_launcher(train, (args.losses,), num_processes=args.notebook_launcher)
else:
    train(args.losses)
