"""The notebook side of nbkit. It runs in the kernel and never imports torch or the rank side."""
