"""`python -m bench`: nbkit beside its peers, measured in one run. Not shipped with the package."""
