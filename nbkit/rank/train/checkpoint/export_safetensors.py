"""Write the weights of a checkpoint to one safetensors file, tensor by tensor, without process group and model.

python -m nbkit.rank.train.checkpoint.export_safetensors DIR FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from nbkit.errors import NbkitError, TrainingError
from nbkit.rank.train.checkpoint.dcp_io import DcpReader, fill
from nbkit.tensor_layout import Layout

# The safetensors names of dtypes.
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def export(folder: str | Path, target: str | Path) -> tuple[int, int]:
    """Write all parameters and buffers of the checkpoint in `folder` to `target`. Return (number of tensors, bytes).

    `model.load_state_dict(safetensors.torch.load_file(target))` loads the file: the names are those of the state dict.
    A tied weight is written under each of its names, because the format has no references. Memory holds one tensor at a
    time. Raises TrainingError if `folder` is damaged or is no checkpoint, or if `target` cannot be written. In that
    case an existing file `target` stays intact.
    """
    beside = Path(target).with_name(f"{Path(target).name}.tmp")
    try:
        reader = DcpReader(Path(folder))
        about = reader.about
        if changed := about.get("changed_by"):
            raise ValueError(
                f"{changed} makes the model's state dict in its own way, and there is no model here: save "
                "trainer.full_state_dict() with safetensors.torch.save_file"
            )
        header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(about["step"])}}
        end = 0
        for name, key, shape in about["names"]:
            if name in header:
                raise ValueError(f"it names {name!r:.80} twice")
            kind = reader.kinds.get(key, torch.float32)  # a tensor without elements has no dtype in a checkpoint
            begin, end = end, end + torch.Size(shape).numel() * kind.itemsize
            header[name] = {"dtype": _TYPES[kind], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        beside.unlink(missing_ok=True)
        try:
            with beside.open("xb") as file:  # "x": never write through an existing link
                file.write(len(text).to_bytes(8, "little") + text)
                for _, key, shape in about["names"]:
                    tensor = torch.zeros(shape, dtype=reader.kinds.get(key, torch.float32))
                    fill(reader, {key: (tensor, Layout.whole(shape))})
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except Exception as error:  # the directory may contain anything
        raise TrainingError(
            f"The checkpoint {str(folder)!r} could not be exported to {str(target)!r}.",
            numbers=f"{type(error).__name__}: {error}",
            hint="nbkit checkpoint export DIR FILE   (DIR as given to trainer.save)",
        ) from error
    return len(header) - 1, end


if __name__ == "__main__":
    try:
        number, size = export(*sys.argv[1:])
    except NbkitError as failure:
        sys.exit(f"nbkit: {failure}")
    print(f"{sys.argv[2]}: {number} tensors, {size / 1e6:.1f} MB")
