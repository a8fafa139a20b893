"""A package, so that the browser and the server of its tests end with the last of them."""
