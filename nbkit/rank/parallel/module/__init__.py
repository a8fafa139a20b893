"""Tools for a user's module under any strategy: its blocks, its shapes without memory, wrappers of its forward."""
