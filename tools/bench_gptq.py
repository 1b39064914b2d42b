#!/usr/bin/env python3
"""Write a checkpoint in the layout of GPTQ: int4 in groups, rounded to nearest.

    bench_gptq.py FOLDER OUT [--group 128]

For speed, so the scales are simply the largest magnitude of each group over seven. Embedding and head stay as they are,
as in the files that people have.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

QUANTIZED = re.compile(r"model\.layers\.\d+\..*_proj\.weight")
ZERO = 8  # stands for 0; GPTQ stores one less


def quantize(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Return the parts of a matrix ``[outputs, inputs]`` by their names in GPTQ."""
    outputs, inputs = weight.shape
    grouped = weight.float().view(outputs, -1, group)
    scales = (grouped.abs().amax(-1) / 7).clamp(min=1e-8).half()
    codes = ((grouped / scales.float()[..., None]).round() + ZERO).clamp(0, 15).int().view(outputs, inputs)
    zeros = torch.full((inputs // group, outputs), ZERO - 1, dtype=torch.int32)
    return {
        "qweight": pack(codes.T, 0),
        "qzeros": pack(zeros, 1),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(inputs) // group).int(),
    }


def dequantize(parts: dict[str, torch.Tensor], group: int) -> torch.Tensor:
    """Return the weights ``[outputs, inputs]`` that the parts of a matrix stand for, as float32."""
    codes, zeros = unpack(parts["qweight"], 0), unpack(parts["qzeros"], 1) + 1
    grouped = (codes.unflatten(0, (-1, group)) - zeros[:, None]) * parts["scales"].float()[:, None]
    return grouped.flatten(0, 1).T


def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack([packed >> 4 * number & 15 for number in range(8)], dim + 1).flatten(dim, dim + 1)


def pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack eight codes of four bits along a dimension into one int32, the first one lowest."""
    parts = codes.unflatten(dim, (-1, 8)).unbind(dim + 1)
    packed = torch.zeros_like(parts[0])
    for number, part in enumerate(parts):
        packed |= part << 4 * number
    return packed.contiguous()


def converted(file: Path, group: int) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as shard:
        for name in shard.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            tensor = shard.get_tensor(name)
            if not QUANTIZED.fullmatch(name):
                yield name, tensor
                continue
            for part, numbers in quantize(tensor, group).items():
                yield f"{name.removesuffix('weight')}{part}", numbers


def write(folder: Path, out: Path, group: int = 128) -> None:
    """Write the checkpoint. Its configuration comes last, so a folder that has it is complete."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    out.mkdir(parents=True, exist_ok=True)
    tensors = dict(item for file in sorted(folder.glob("*.safetensors")) for item in converted(file, group))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.out, arguments.group)


if __name__ == "__main__":
    main()
