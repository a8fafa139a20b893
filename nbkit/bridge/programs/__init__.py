"""What programs find otherwise on a rank than in a process of their own."""
