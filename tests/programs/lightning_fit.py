"""Lightning: a LightningModule, a Trainer with the strategy ddp, sync_dist, and a metric of torchmetrics."""

import argparse

import lightning
import torch
import torchmetrics

parser = argparse.ArgumentParser()
parser.add_argument("--losses", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.right = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.seen = []

    def training_step(self, batch, number):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        self.seen.append(mean.item())
        return loss

    def validation_step(self, batch, number):
        self.right.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.seen.append(self.right.compute().item())
        self.right.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(4)
data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(48)]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
module = Module()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=args.strategy, max_epochs=2, num_sanity_val_steps=0, **quiet
)
trainer.fit(module, loader, torch.utils.data.DataLoader(data, batch_size=4))
if trainer.is_global_zero:
    with open(args.losses, "w") as file:
        file.write(repr(module.seen))
