"""Code that the notebook and the ranks share: messages, cells and values between them; processes; nvidia-smi."""
