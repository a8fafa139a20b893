"""Make these tests a package, so that their clusters end with the last test."""
