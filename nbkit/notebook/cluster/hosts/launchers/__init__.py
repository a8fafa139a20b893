"""nbkit's own launchers, a file for each kind. A new file here is found without any other change."""
