"""Reading of stored tensors into memory."""

from __future__ import annotations

import torch

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.hub.presence import check_present

# Types of the tensors by the file's name for them. Numbers of 8 bits that torch can't compute with are read as bytes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
}


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a tensor with a copy of the stored bytes. Raises ``ModelError``."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    _read_into(stored, memoryview(tensor.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return tensor


def read_bytes(stored: StoredTensor) -> torch.Tensor:
    """Return the stored bytes, uint8. Raises ``ModelError``."""
    data = torch.empty(stored.num_bytes, dtype=torch.uint8)
    _read_into(stored, memoryview(data.numpy()))  # type: ignore[arg-type]
    return data


def _read_into(stored: StoredTensor, target: memoryview) -> None:
    check_present(stored)
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            while len(target):
                count = file.readinto(target)
                if not count:
                    raise ModelError(f"{stored.path} ends inside tensor {stored.name}; download it again")
                target = target[count:]
    except OSError as error:
        raise ModelError(f"{stored.path} can't be read ({error}) at tensor {stored.name}") from None
