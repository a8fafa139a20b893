"""TensorBoard's tab "Communication": charts of a run's records, drawn while it trains."""
