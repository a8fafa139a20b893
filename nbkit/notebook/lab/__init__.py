"""nbkit in JupyterLab: server.py runs in the Jupyter server, nbkit-train/ in the browser."""
