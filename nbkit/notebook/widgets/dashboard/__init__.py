"""The dashboard of a run: it reads the run's records during the training, and shows them as a widget or as text."""
