"""What it costs to prove, before it trains, that a model is cut right."""
