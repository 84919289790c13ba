"""Cuts one layer out of the reference's checkpoints with weights in fewer bits, for ../formats.rs.

    python layers.py SOURCE DESTINATION

SOURCE holds one folder per case: a checkpoint with `expected.json` and `expected.safetensors`. A case of DESTINATION has the
quantization_config, the tensors of one module under their real names, and `expected.safetensors` with an `input` of 6 rows and the
`output`. Where the format rounds activations, both are the reference's. Elsewhere the input is random, and the output is the sum in
double precision of weights that this script dequantises as the format's definition says. Needs only Python.
"""

import json
import math
import random
import struct
import sys
from pathlib import Path

MODULE = "model.layers.0.self_attn.k_proj"
EXPERT = "model.layers.0.mlp.experts.down_proj"
SIZES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class Tensor:
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, shape, data

    def numbers(self):
        if self.dtype == "BF16":
            return [struct.unpack("<f", bytes(2) + self.data[i : i + 2])[0] for i in range(0, len(self.data), 2)]
        if self.dtype == "F8_E4M3":
            return [e4m3(byte) for byte in self.data]
        # Packed words are unsigned.
        letter = {"I8": "b", "U8": "B", "F16": "e", "I32": "I", "F32": "f"}[self.dtype]
        return list(struct.unpack(f"<{len(self.data) // SIZES[self.dtype]}{letter}", self.data))

    def rows(self):
        numbers, width = self.numbers(), self.shape[-1]
        return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def e4m3(byte):
    sign, exponent, fraction = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    return sign * (math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9))


def load(file):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {name: Tensor(t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def save(tensors, file):
    header, data = {}, b""
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [len(data), len(data) + len(t.data)]}
        data += t.data
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers want aligned data.
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def fields(word, bits):
    return [word >> at & (1 << bits) - 1 for at in range(0, 32, bits)]


def unpacked(rows, bits, order=None):
    """Fields along rows; `order` gives the place of each field in its word."""
    out = []
    for row in rows:
        words = [fields(word, bits) for word in row]
        places = order or range(32 // bits)
        out.append([word[list(places).index(i)] for word in words for i in range(len(word))])
    return out


def transposed(rows):
    return [list(column) for column in zip(*rows)]


def weights(method, config, t):
    """Returns W[out][in]."""
    if method == "gptq":
        bits, less = config["bits"], 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        q = unpacked(transposed(t["qweight"].rows()), bits)
        zeros, scales, groups = unpacked(t["qzeros"].rows(), bits), t["scales"].rows(), t["g_idx"].numbers()
        return [[scales[g][o] * (x - zeros[g][o] - less) for x, g in zip(row, groups)] for o, row in enumerate(q)]
    if method == "awq":
        order, size = [0, 2, 4, 6, 1, 3, 5, 7], config["group_size"]
        q, zeros = unpacked(t["qweight"].rows(), 4, order), unpacked(t["qzeros"].rows(), 4, order)
        scales = t["scales"].rows()
        rows = [[scales[i // size][o] * (x - zeros[i // size][o]) for o, x in enumerate(row)] for i, row in enumerate(q)]
        return transposed(rows)
    if method == "compressed-tensors":
        size = config["config_groups"]["group_0"]["weights"]["group_size"]
        q, scales = unpacked(t["weight_packed"].rows(), 4), t["weight_scale"].rows()
        zeros = t.get("weight_zero_point")
        zeros = transposed(unpacked(transposed(zeros.rows()), 4)) if zeros else [[8] * len(scales[0])] * len(scales)
        groups = t["weight_g_idx"].numbers() if "weight_g_idx" in t else [i // size for i in range(len(q[0]))]
        return [[scales[o][g] * (x - zeros[o][g]) for x, g in zip(row, groups)] for o, row in enumerate(q)]
    assert method == "mxfp4"
    # The second of the matrices.
    size, outputs = math.prod(t["blocks"].shape[1:]), t["scales"].shape[1]
    codes, scales = t["blocks"].data[size : 2 * size], t["scales"].rows()[outputs : 2 * outputs]
    nibbles = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
    width = 32 * len(scales[0])
    value = lambda code, scale: (-1 if code & 8 else 1) * math.ldexp(FP4[code & 7], scale - 127)
    return [[value(nibbles[o * width + i], row[i // 32]) for i in range(width)] for o, row in enumerate(scales)]


def floats(rows):
    return Tensor("F32", [len(rows), len(rows[0])], b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows))


def cut(source, destination):
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    expected = load(source / "expected.safetensors")
    module = EXPERT if config["quant_method"] == "mxfp4" else MODULE
    # The separator is a dot, but an underscore for experts.
    tensors = {name: t for name, t in load(source / "model.safetensors").items() if name.startswith(module)}
    tensors = {name: t for name, t in tensors.items() if not name.endswith("bias")}
    own = {name[len(module) + 1 :]: t for name, t in tensors.items()}
    if f"linear.{module}.input" in expected:
        layer = {part: expected[f"linear.{module}.{part}"] for part in ["input", "output"]}
    else:
        w, draw = weights(config["quant_method"], config, own), random.Random(source.name)
        # Multiples of 1/64 below 2 are exact in every type.
        x = [[draw.randrange(-127, 128) / 64 for _ in w[0]] for _ in range(6)]
        y = [[math.fsum(a * b for a, b in zip(row, column)) for column in w] for row in x]
        layer = {"input": floats(x), "output": floats(y)}
    destination.mkdir(parents=True, exist_ok=True)
    (destination / "config.json").write_text(json.dumps({"quantization_config": config}) + "\n")
    save(tensors, destination / "model.safetensors")
    save(layer, destination / "expected.safetensors")


if __name__ == "__main__":
    source, destination = map(Path, sys.argv[1:3])
    for file in sorted(source.glob("*/config.json")):
        if "quantization_config" in json.loads(file.read_text()):
            cut(file.parent, destination / file.parent.name)
