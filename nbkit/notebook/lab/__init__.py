"""nbkit in JupyterLab: what its server tells (server.py), and what the browser shows (nbkit-train/)."""
