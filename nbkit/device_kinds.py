"""The kinds of device that ranks compute on, and the communication backend between devices of each kind.

This is all that the notebook knows of them. What the ranks ask of a kind is a class: see nbkit/rank/device.py.
"""

CPU, GLOO = "cpu", "gloo"

NVIDIA = "cuda"
"""torch's name for the GPUs that nvidia-smi lists."""

BACKENDS = {NVIDIA: "nccl"}
"""The backend between devices of each kind, as torch names both."""
