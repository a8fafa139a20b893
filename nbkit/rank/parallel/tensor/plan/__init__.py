"""Tensor plans: which modules are split over the tensor axis, and how. The user or the module tree decides."""
