"""The tests; see CONTRIBUTING.md."""
