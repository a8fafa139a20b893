"""The rank wing: the code that trains. It never imports Jupyter, so the same code runs under torchrun."""
