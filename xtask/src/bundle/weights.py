"""Makes random weights for the shapes of a bundle.

    weights.py SHAPES WORK NAME...

SHAPES/NAME has a checkpoint without tensors, and head.safetensors, the bytes before the tensors. WORK/NAME becomes the whole
checkpoint, with a file `ready` when it is complete. The same seed gives the same bytes on the same kind of device.
"""

import json
import lzma
import pathlib
import shutil
import struct
import sys

try:
    import torch
except ImportError:
    sys.exit("weights.py: found no module torch in this python3; pip install torch")

DEVIATION = 0.02  # standard deviation, as in the initialisation of real models
CHUNK = 1 << 28  # numbers drawn at once


def tensors(head):
    """Returns the names and sizes of the tensors, in the order of the file."""
    (length,) = struct.unpack("<Q", head[:8])
    entries = json.loads(head[8 : 8 + length])
    ordered = sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"][0])
    return [(name, (entry["data_offsets"][1] - entry["data_offsets"][0]) // 2) for name, entry in ordered]


def write(shape, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for file in shape.iterdir():
        if file.suffix == ".xz":
            (folder / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        elif file.name != "head.safetensors":
            shutil.copy(file, folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    head = (shape / "head.safetensors").read_bytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(head)
        for name, count in tensors(head):
            for start in range(0, count, CHUNK):
                numbers = torch.empty(min(CHUNK, count - start), dtype=torch.bfloat16, device=device)
                if "norm" in name:
                    numbers.fill_(1)
                else:
                    numbers.normal_(0, DEVIATION, generator=generator)
                file.write(numbers.cpu().view(torch.int16).numpy())
    (folder / "ready").touch()
    print(f"{folder.name}: {(folder / 'model.safetensors').stat().st_size / 1e9:.2f} GB")


def main(shapes, work, *names):
    for name in names:
        write(pathlib.Path(shapes) / name, pathlib.Path(work) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
