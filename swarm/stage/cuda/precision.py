"""Settings of torch's own kernels on CUDA devices: sums in float32, and no TF32."""

from __future__ import annotations

import torch


def use_full_precision() -> None:
    """Make torch's matrix products on CUDA devices multiply float32 as it is, and add up 16-bit numbers in float32.

    Idempotent.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
