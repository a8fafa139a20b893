"""What gloo lacks: a reduce-scatter of its own, and waits that another thread can end."""
