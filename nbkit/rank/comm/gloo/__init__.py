"""Features that gloo lacks: a reduce-scatter that sends only what is needed, and waits that another thread can end."""
