"""Tensor plans: the modules that are split over the tensor axis, and how; given, or found in the module tree."""
