"""Read a run's records, for all views: dashboard, card, report, terminal, TensorBoard's tab."""
