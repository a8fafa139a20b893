"""What is measured while a job trains, and where it is written."""
