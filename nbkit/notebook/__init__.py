"""The notebook wing: runs in the kernel, never imports torch nor the rank wing."""
