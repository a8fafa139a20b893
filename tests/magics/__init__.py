"""A package, so that the kernel of its tests ends with the last of them."""
