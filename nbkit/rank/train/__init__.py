"""The training loop: data, job, trainer."""
