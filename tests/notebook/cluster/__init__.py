"""A package, so that the clusters of its tests end with the last of them."""
