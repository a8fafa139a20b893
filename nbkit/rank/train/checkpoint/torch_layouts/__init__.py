"""Checkpoints that other programs wrote with torch.distributed.checkpoint, and ours in their layouts."""
