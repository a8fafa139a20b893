"""Features that gloo lacks: a real reduce-scatter, and waits that another thread can end."""
