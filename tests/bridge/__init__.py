"""Make these tests a package, so that their cluster ends with the last test."""
