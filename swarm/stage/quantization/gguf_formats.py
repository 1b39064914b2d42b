"""Quantized tensor types of GGUF files, as weight formats. Does not import torch.

Q4_1, Q5_1 and the K types add a minimum, which here is subtracted: it changes its sign in the first two. MXFP4's table
is doubled and its scales halved, as in llama.cpp, so that every exponent of a file is a finite scale.
"""

from __future__ import annotations

from swarm.errors import ModelError
from swarm.stage.quantization.formats import E2M1, Codes, Minima, Scales, WeightFormat

PLAIN = ("F32", "F16", "BF16")

FORMATS: dict[str, WeightFormat] = {
    form.name: form
    for form in (
        WeightFormat("Q8_0", Codes.INT8, 32, offset=128),
        WeightFormat("Q4_0", Codes.INT4, 32, offset=8),
        WeightFormat("Q4_1", Codes.INT4, 32, minima=Minima.FLOAT16),
        WeightFormat("Q5_0", Codes.INT5, 32, offset=16),
        WeightFormat("Q5_1", Codes.INT5, 32, minima=Minima.FLOAT16),
        WeightFormat("Q4_K", Codes.INT4, 32, Scales.NESTED, Minima.NESTED),
        WeightFormat("Q5_K", Codes.INT5, 32, Scales.NESTED, Minima.NESTED),
        WeightFormat("Q6_K", Codes.INT6, 16, Scales.NESTED, offset=32),
        WeightFormat("MXFP4", Codes.INT4, 32, Scales.BFLOAT16, table=tuple(2 * value for value in E2M1)),
    )
}


def check_type(file: str, tensor: str, kind: str) -> None:
    """Raise ``ModelError`` if tensors of this type can't be used."""
    if kind not in FORMATS and kind not in PLAIN:
        raise ModelError(
            f"{file} stores {tensor} as {kind}, which is not supported; use a file with {', '.join(FORMATS)}, F16, "
            "BF16 or F32, such as a Q4_K_M or Q8_0 file"
        )
