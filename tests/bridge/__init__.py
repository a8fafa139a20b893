"""A package, so that the cluster of its tests ends with the last of them."""
