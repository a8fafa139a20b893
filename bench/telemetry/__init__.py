"""What telemetry costs, and whether what it says is true."""
