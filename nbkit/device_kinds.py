"""The kinds of device that ranks compute on, and the communication backend between devices of each kind.

The notebook knows no more than this about devices. Ranks use a class for each kind: see nbkit/rank/device.py.
"""

CPU, GLOO = "cpu", "gloo"

NVIDIA = "cuda"
"""torch's name for the GPUs that nvidia-smi lists."""

BACKENDS = {NVIDIA: "nccl"}
"""The backend between devices of each kind, as torch names both."""
