"""Tensor plans: which modules are split over the tensor axis, and how. They are given, or found in the module tree."""
