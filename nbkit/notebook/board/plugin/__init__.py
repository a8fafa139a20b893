"""TensorBoard's tab "Communication": what the records of a run say, drawn while it trains."""
