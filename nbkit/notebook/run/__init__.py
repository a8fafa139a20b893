"""A run read from its records for whoever shows it: dashboard, card, report, terminal, TensorBoard's tab."""
