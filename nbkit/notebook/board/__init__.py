"""TensorBoard beside the notebook."""
