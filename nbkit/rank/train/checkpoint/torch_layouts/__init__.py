"""Converts checkpoints of nbkit to the torch.distributed.checkpoint layouts of other programs."""
