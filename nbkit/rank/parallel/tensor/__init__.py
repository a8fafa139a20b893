"""Tensor parallelism: `plan/` finds which module is split how, `apply.py` splits it, `proof/` judges it."""
