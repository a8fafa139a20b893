"""What a step takes, by part."""
