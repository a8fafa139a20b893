"""What a strategy costs, by arithmetic, before it runs."""
