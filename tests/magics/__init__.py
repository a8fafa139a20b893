"""Make these tests a package, so that their kernel ends with the last test."""
