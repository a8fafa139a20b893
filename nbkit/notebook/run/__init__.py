"""A run, read from its records for all views: dashboard, card, report, terminal, TensorBoard's tab."""
