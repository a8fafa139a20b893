"""What every strategy asks of a user's module: its blocks, its shapes without memory, wrappers around its forward."""
