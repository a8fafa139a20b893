"""Ask the CUDA driver about its devices, in a separate process: no CUDA library is loaded into the notebook's process.

The driver knows two things that NVML, and so nvidia-smi and nvidia-ml-py, cannot tell. First, NVML never initializes
CUDA: it lists GPUs even if cuInit fails (a library is missing in a container, the fabric manager does not run), and
knows no error. Second, a container with only the driver's "compute" part has libcuda, but neither NVML nor nvidia-smi.
There only the driver can list the GPUs, so it is also asked for names, memory and compute capability.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

_SECONDS = 60.0
# The linker's choice, then the paths on NixOS and WSL, which torch tries there too.
_LIBRARIES = ("libcuda.so.1", "/run/opengl-driver/lib/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
# cuInit creates no context, so it takes no GPU memory, and nvidia-smi shows no process. cuDriverGetVersion returns the
# version of the loaded library, which may be newer than the driver ("cuda-compat" in containers).
_QUESTION = """
import ctypes, json, sys

cuda, missing = None, ""
for path in sys.argv[1:]:
    try:
        cuda = cuda or ctypes.CDLL(path)
    except OSError as error:
        missing = missing or str(error)
if cuda is None:
    print(json.dumps({"error": missing}))
    sys.exit()

number, text, uuid, size = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()

def ask(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        said = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(said))
        print(json.dumps({**answer, "error": (said.value or b"unknown error").decode(), "code": code}))
        sys.exit()

answer = {}
ask("cuDriverGetVersion", ctypes.byref(number))
answer["version"] = [number.value // 1000, number.value % 1000 // 10]
ask("cuInit", 0)
ask("cuDeviceGetCount", ctypes.byref(number))
answer["devices"] = []
for index in range(number.value):
    device = ctypes.c_int()
    ask("cuDeviceGet", ctypes.byref(device), index)
    ask("cuDeviceGetName", text, 256, device)
    name = text.value.decode()
    ask("cuDeviceGetPCIBusId", text, 256, device)
    ask("cuDeviceGetUuid_v2", uuid, device)
    digits = bytes(uuid).hex()
    ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    capability = []
    for attribute in 75, 76:
        ask("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        capability.append(number.value)
    answer["devices"].append({
        "uuid": "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
        "name": name, "bus": text.value.decode(), "mib": size.value >> 20, "capability": capability,
    })
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device, in PCI order. uuid: in the form that CUDA_VISIBLE_DEVICES accepts."""

    uuid: str
    name: str
    bus: str
    mib: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class CudaDriver:
    """The CUDA driver's answer.

    version: the CUDA version that the driver supports, None if its library is missing. error: the error of cuInit, ""
    without one. code: its number, 0 without one. On a GPU that is divided by MIG, CUDA lists only one instance.
    """

    version: tuple[int, int] | None = None
    devices: tuple[CudaDevice, ...] = ()
    error: str = ""
    code: int = 0


def begin() -> subprocess.Popen[str]:
    """Start the question; `finish` returns the answer. Raises OSError if no process can be started."""
    # List all devices, in nvidia-smi's order, even if the notebook's environment hides some.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-I", "-S", "-c", _QUESTION, *_LIBRARIES]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )


def finish(asked: subprocess.Popen[str]) -> CudaDriver | None:
    """Return the answer, or None if there is none."""
    try:
        said, _ = asked.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        asked.kill()
        with suppress(subprocess.TimeoutExpired):  # a process in a broken driver cannot be killed
            asked.communicate(timeout=1)
        return None
    return parse_answer(said)


def parse_answer(said: str) -> CudaDriver | None:
    """Return the values in the process's line of JSON; None for other output."""
    try:
        answer = json.loads(said)
        version = answer.get("version")
        devices = tuple(
            CudaDevice(
                ("MIG-" if " MIG " in each["name"] else "GPU-") + each["uuid"],
                each["name"],
                each["bus"].lower(),
                int(each["mib"]),
                (int(each["capability"][0]), int(each["capability"][1])),
            )
            for each in answer.get("devices", ())
        )
        known = None if version is None else (int(version[0]), int(version[1]))
        return CudaDriver(known, devices, str(answer.get("error", "")), int(answer.get("code", 0)))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
