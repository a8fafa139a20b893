"""Tensor parallelism: `plan/` decides how modules are split, `apply.py` splits them, `proof/` checks the splits."""
