"""TensorBoard in the notebook."""
