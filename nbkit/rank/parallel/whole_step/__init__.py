"""A tiny whole step of every composition of techniques, in threads of one process, beside one process."""
