"""Make this folder a package, so that browser and server end with the last test."""
