#!/usr/bin/env python3
"""Measure products with quantized weights: bytes of packed weights per second, beside what memory alone allows.

Matrices are multiplied in turn, so that none stays in the caches. A probe that only reads the same memory, by as many
threads, runs in between; shares are of its median. All formats take turns at each number of rows. ``torch-int4`` and
``torch-int8`` are torch's own products (bfloat16 only): ``_weight_int4pack_mm_for_cpu`` with groups of 32, and
``_weight_int8pack_mm`` with one scale for each output.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from bench_lib import tell_lines, wait_passively

from swarm.stage import native
from swarm.stage.native import cores
from swarm.stage.native.linears import allocate_packed
from swarm.stage.native.quantized import QuantizedExperts
from swarm.stage.quantization.formats import SUPER_GROUP, Codes, Minima, Scales, WeightFormat
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight

_MINIMA = Minima.FLOAT16
FORMATS = {
    "Q4_0": WeightFormat("Q4_0", Codes.INT4, 32, offset=8),
    "Q4_1": WeightFormat("Q4_1", Codes.INT4, 32, minima=_MINIMA),
    "Q4_K": WeightFormat("Q4_K", Codes.INT4, 32, Scales.NESTED, Minima.NESTED),
    "GPTQ": WeightFormat("GPTQ", Codes.INT4, 128, minima=Minima.ZERO_POINTS, offset=8),
    "Q5_K": WeightFormat("Q5_K", Codes.INT5, 32, Scales.NESTED, Minima.NESTED),
    "Q6_K": WeightFormat("Q6_K", Codes.INT6, 16, Scales.NESTED, offset=32),
    "Q8_0": WeightFormat("Q8_0", Codes.INT8, 32, offset=128),
    "FP8": WeightFormat("FP8", Codes.FP8, 128),
}
TORCH = ("torch-int4", "torch-int8")
TORCH_GROUP = 32
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
TOTAL_BYTES = 192 << 20  # of the matrices that are multiplied in turn
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_probe(folder: Path) -> Callable[[int, int, int], object]:
    """Compile the read-only probe."""
    source, built = Path(__file__).with_name("read_probe.c"), folder / "read_probe.so"
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    probe = ctypes.CDLL(str(built)).read_memory
    probe.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return probe


def random_weight(form: WeightFormat, outputs: int, inputs: int, count: int) -> QuantizedWeight:
    """Return equal matrices of random codes; their scales don't matter for the speed."""
    codes = torch.randint(0, 16 if form.codes is Codes.INT4 else 32, (outputs, inputs), dtype=torch.uint8)
    groups, supers = inputs // form.group, -(-inputs // SUPER_GROUP)
    nested = form.scales is Scales.NESTED

    def numbers(dtype: torch.dtype, columns: int) -> torch.Tensor:
        return torch.ones(outputs, columns, dtype=dtype)

    minima = {
        Minima.NONE: None,
        Minima.FLOAT16: numbers(torch.float16, groups),
        Minima.ZERO_POINTS: numbers(torch.uint8, groups),
        Minima.NESTED: numbers(torch.float16, supers),
    }[form.minima]
    tensor = QuantizedTensor(
        form,
        codes,
        numbers(torch.float16, supers if nested else groups),
        minima,
        numbers(torch.int8, groups) if nested else None,
        numbers(torch.uint8, groups) if form.minima is Minima.NESTED else None,
    )
    tensor = tensor.map_rows(lambda each: each.expand(count, *each.shape))
    return QuantizedWeight(form, tensor.codes.shape, f"bench {form.name} {count}", lambda: tensor)


class Matrices:
    """Equal matrices in one piece of memory, to be multiplied in turn."""

    def __init__(self, name: str, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.name, self.inputs, self.outputs, self.dtype = name, inputs, outputs, dtype
        if name in FORMATS:
            form = FORMATS[name]
            count = (
                TOTAL_BYTES * 2 // (outputs * inputs) if form.codes is Codes.INT4 else TOTAL_BYTES // (outputs * inputs)
            )
            experts = QuantizedExperts([random_weight(form, outputs, inputs, count)], None, dtype)
            self.table, self.memory, self._keep = experts.table(), experts.matrices.packed, experts
        else:
            count = max(2, TOTAL_BYTES // (outputs * inputs * dtype.itemsize))
            packed = allocate_packed(count, outputs, inputs, dtype)
            packed.fill_(0.5)
            kind = native.KINDS[dtype]
            self.table = (native.NativeMatrix * len(packed))(
                *(native.NativeMatrix(each.data_ptr(), None, outputs, inputs, 0, kind, 0.0, 0.0) for each in packed)
            )
            self.memory, self._keep = packed, packed
        self.num_bytes, self.count = self.memory.numel() * self.memory.element_size(), len(self.table)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, count: int) -> float:
        """Multiply the first matrices by rows; return the seconds that each took."""
        library, size = native.library(), ctypes.sizeof(native.NativeMatrix)
        assert library is not None
        base, count = ctypes.addressof(self.table), min(count, self.count)
        began = time.perf_counter()
        for index in range(count):
            library.swarm_linear(
                base + index * size, rows.data_ptr(), self.inputs, len(rows), out.data_ptr(), self.outputs,
                cores.num_threads(),
            )  # fmt: skip
        return (time.perf_counter() - began) / count


class TorchMatrices:
    """Equal matrices of random codes as torch packs and multiplies them."""

    def __init__(self, name: str, outputs: int, inputs: int) -> None:
        self.name, self.dtype = name, torch.bfloat16
        is_int4 = name == "torch-int4"
        self.count = TOTAL_BYTES // (outputs * inputs // (2 if is_int4 else 1))
        codes = torch.randint(0, 16 if is_int4 else 127, (outputs, inputs), dtype=torch.int32)
        if is_int4:
            one = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
            self.factors = torch.ones(inputs // TORCH_GROUP, outputs, 2, dtype=torch.bfloat16)
        else:
            one = codes.to(torch.int8)
            self.factors = torch.ones(outputs, dtype=torch.bfloat16)
        self.memory = native.allocate_weights(self.count * one.numel(), one.dtype).view(self.count, *one.shape)
        self.memory.copy_(one)
        self.num_bytes = self.memory.numel() * self.memory.element_size() + self.count * self.factors.numel() * 2
        self.is_int4 = is_int4

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, count: int) -> float:
        """Multiply the first matrices by rows; return the seconds that each took."""
        count = min(count, self.count)
        began = time.perf_counter()
        for index in range(count):
            last = (
                torch._weight_int4pack_mm_for_cpu(rows, self.memory[index], TORCH_GROUP, self.factors)
                if self.is_int4
                else torch._weight_int8pack_mm(rows, self.memory[index], self.factors)
            )
        spent = (time.perf_counter() - began) / count
        out.copy_(last)
        return spent


def measure(options: argparse.Namespace, probe: Callable[[int, int, int], object]) -> Iterator[dict[str, object]]:
    outputs, inputs = options.shape
    dtype = DTYPES[options.dtype]
    subjects = [
        (each, variant)
        for name in options.formats
        for each in [TorchMatrices(name, outputs, inputs) if name in TORCH else Matrices(name, outputs, inputs, dtype)]
        for variant in (["torch"] if name in TORCH else options.variants)
    ]
    for count in options.rows:
        rows, out = torch.randn(count, inputs).to(dtype), torch.empty(count, outputs, dtype=dtype)
        times: list[list[float]] = [[] for _ in subjects]
        probes: list[list[float]] = [[] for _ in subjects]
        for run in range(options.runs + 1):
            for index, (matrices, variant) in enumerate(subjects):
                size = matrices.memory.numel() * matrices.memory.element_size()
                with native.using_variant(native.variant() if variant == "torch" else variant):
                    if run == 0:  # first calls, which aren't timed
                        matrices.multiply(rows, out, 2)
                        continue
                    began = time.perf_counter()
                    probe(matrices.memory.data_ptr(), size, options.threads)
                    probes[index].append(size / (time.perf_counter() - began))
                    times[index].append(matrices.multiply(rows, out, max(2, 400 // (count + 8))))
        for index, (matrices, variant) in enumerate(subjects):
            spent, each_bytes = median(times[index]), matrices.num_bytes / matrices.count
            yield {
                "format": matrices.name,
                "variant": variant,
                "rows": count,
                "us": round(spent * 1e6),
                "GB/s": round(each_bytes / spent / 1e9, 1),
                "probe": round(median(probes[index]) / 1e9, 1),
                "share": round(each_bytes / spent / median(probes[index]), 2),
                "GF": round(2 * outputs * inputs * count / spent / 1e9),
            }


def shape(text: str) -> tuple[int, int]:
    outputs, inputs = (int(part) for part in text.split("x"))
    return outputs, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS, *TORCH, "dense"], default=[*FORMATS, "dense"])
    parser.add_argument("--variants", nargs="+", default=None, help="default: the one that this machine uses")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shape", type=shape, default=(5632, 2048), help="outputs x inputs")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wait_passively()
    if native.library() is None:
        parser.error(f"no kernels: {native.unavailable_reason()}")
    if options.dtype != "bfloat16" and set(options.formats) & set(TORCH):
        parser.error("torch's own products have bfloat16 rows")
    options.variants = options.variants or [native.variant()]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), cores.computing(options.threads, 512):
        found = list(measure(options, build_probe(Path(folder))))
    tell_lines("quantized", found, {"dtype": options.dtype, "shape": options.shape}, as_json=options.json)


if __name__ == "__main__":
    main()
