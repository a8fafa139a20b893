"""The dashboard: a run read from its records while it trains, as a widget and as text."""
