"""The code that runs on ranks and trains. It never imports Jupyter, so the same code runs under torchrun."""
