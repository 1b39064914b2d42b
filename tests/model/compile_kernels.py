"""Compile the attention's kernels for Hopper GPUs, without one: ``python -m tests.model.compile_kernels``.

Prints the shared memory of each, and fails if a kernel is compiled again for another batch. Run as a process of its
own: Triton must not interpret kernels there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from swarm.stage.attention import page_kernels as kernels
from swarm.stage.attention.pages import PAGE

POINTERS = {"bfloat16": ("*bf16", 2), "float32": ("*fp32", 4)}
CASES = (
    ("bfloat16", (4, 128, 128), False),
    ("bfloat16", (4, 128, 128), True),
    ("bfloat16", (16, 576, 0), True),
    ("bfloat16", (2, 256, 256), False),
    ("float32", (4, 64, 64), False),
    ("float32", (4, 128, 128), False),
)
TARGET = GPUTarget("cuda", 90, 32)
# What another batch changes of a call: other sizes, and tensors that begin elsewhere within others.
BATCH_NUMBERS = {
    "p_token": (16, 21),
    "table_width": (1, 16),
    "most_splits": (1, 3),
    "window": (0, 512),
    "chunk": (0, 16),
}
BATCH_TENSORS = {
    **{"addresses": torch.int64, "offsets": torch.int32, "starts": torch.int32, "counts": torch.int32},
    **{"tables": torch.int32, "pages": torch.int32, "token_pages": torch.int32, "token_places": torch.int32},
}
MAX_SHARED = 227 * 1024
FLOATS, LONGS = ("sinks", "slopes", "part_max", "part_sum", "part_mix"), ("addresses",)
INTEGERS = ("offsets", "starts", "counts", "tables", "pages")
ALIGNED = ("query", "out", "q_token", "q_head", "o_token", "o_head", "part_mix")


def compile_attention(dtype: str, group: int, key_size: int, value_size: int, *, by_split: bool) -> int:
    """Compile a kernel; return the bytes of shared memory that it takes. Values of size 0 are latents. Fails if it
    loads numbers of 16 bits one by one."""
    pointer, itemsize = POINTERS[dtype]
    rows, block = kernels._tile_sizes(key_size * itemsize)
    main, rest = kernels._split_size(key_size)
    size = value_size or 512
    constants = {
        **{"FIRST_HEAD": 0, "HEADS": 1, "GROUP": group, "GROUP_UP": min(rows, triton.next_power_of_2(group))},
        **{"KEY": key_size, "KEY_ROW": key_size, "MAIN": main, "REST": rest, "PAGE": PAGE, "SPLIT": kernels.SPLIT},
        **{"VALUE": size, "VALUE_ROW": value_size, "VALUE_UP": triton.next_power_of_2(size)},
        **{"ROWS": rows, "BLOCK": block, "BY_SPLIT": by_split},
        **{"HAS_CAP": True, "HAS_SLOPES": True, "HAS_SINKS": True},
    }
    types = {"query": pointer, "out": pointer, "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(LONGS, "*i64") | dict.fromkeys(INTEGERS, "*i32")
    names = kernels._attend.arg_names
    source = ASTSource(
        fn=kernels._attend,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    options = {"num_warps": 4 if key_size <= 128 else 8, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=TARGET, options=options)
    assert "ld.global.b16" not in compiled.asm["ptx"], "keys or values are loaded one by one"
    return int(compiled.metadata.shared)


def specialize(kernel: Any, given: Mapping[str, object]) -> Any:
    """Return what a kernel is compiled for, beside its constants."""
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    return bind(*(given.get(name, 16) for name in kernel.arg_names))[1]


def varies(kernel: Any) -> bool:
    """Whether a kernel is compiled again for another batch."""
    numbers, tensors = torch.zeros(64, dtype=torch.int64), BATCH_TENSORS.items()
    batches = [
        {name: pair[n] for name, pair in BATCH_NUMBERS.items()}
        | {name: numbers.view(dtype)[4 + n :] for name, dtype in tensors}
        for n in (0, 1)
    ]
    return specialize(kernel, batches[0]) != specialize(kernel, batches[1])


def main() -> int:
    most, again = 0, [kernel for kernel in (kernels._attend, kernels._join_splits, kernels._write) if varies(kernel)]
    print("compiled again for another batch:", *(kernel.__name__ for kernel in again))
    for dtype, shape, by_split in CASES:
        shared = compile_attention(dtype, *shape, by_split=by_split)
        print(dtype, *shape, "by split" if by_split else "whole", shared)
        most = max(most, shared)
    return int(most > MAX_SHARED or bool(again))


if __name__ == "__main__":
    sys.exit(main())
