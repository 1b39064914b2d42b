"""Parts of quantized matrices among a checkpoint's tensors, checked against each other. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.formats import GROUPS, Scales

Shape = tuple[int, ...]

# Encoding of the scales by their stored dtype. The exponents of E8M0 are powers of two, exact in bfloat16.
SCALES = {
    "F16": Scales.FLOAT16,
    "BF16": Scales.BFLOAT16,
    "F32": Scales.FLOAT32,
    "F8_E8M0": Scales.BFLOAT16,
    "U8": Scales.BFLOAT16,
}
FLOAT_SCALES = ("F16", "BF16", "F32")


class TensorPool:
    """Tensors of a checkpoint, from which the descriptions of quantized matrices take their parts.

    ``rest`` holds the tensors that are not part of a quantized matrix.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.rest = dict(tensors)

    def modules(self, ending: str) -> Iterator[str]:
        """Return the names of the modules that have a tensor with this ending, which starts with a dot."""
        return (name.removesuffix(ending) for name in list(self.rest) if name.endswith(ending))

    def take(
        self, name: str, dtypes: Collection[str], *shapes: Shape, beside: StoredTensor | None = None
    ) -> StoredTensor:
        """Remove a tensor from ``rest`` and return it.

        ``shapes`` are the shapes that it may have. Raises ``ModelError`` if it is missing, which the error reports with
        the tensor ``beside`` that requires it, or if its dtype or shape is another one.
        """
        tensor = self.rest.pop(name, None)
        if tensor is None:
            where = f"{beside.path} has {beside.name}, but" if beside else "the checkpoint has"
            raise ModelError(f"{where} no {name}; download the missing files again")
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{tensor.path} stores {name} as {tensor.dtype} instead of {' or '.join(dtypes)}; the file contradicts "
                "its quantization_config"
            )
        if shapes and tensor.shape not in shapes:
            raise contradiction(tensor, *shapes)
        return tensor

    def take_matrix(self, name: str, dtypes: Collection[str], *num_dimensions: int) -> StoredTensor:
        """Remove a tensor with these numbers of dimensions, none of which is empty, and return it."""
        tensor = self.take(name, dtypes)
        if len(tensor.shape) not in num_dimensions or 0 in tensor.shape:
            raise ModelError(f"{tensor.path} stores {name} with shape {_show(tensor.shape)}, which is not a matrix")
        return tensor

    def dtype(self, name: str) -> str | None:
        """Return the dtype of a tensor; None if there is no such tensor."""
        tensor = self.rest.get(name)
        return None if tensor is None else tensor.dtype

    def discard(self, name: str) -> None:
        """Remove a tensor that is not used."""
        self.rest.pop(name, None)


def contradiction(tensor: StoredTensor, *shapes: Shape) -> ModelError:
    """Return the error for a tensor that has none of the shapes that the configuration requires."""
    return ModelError(
        f"{tensor.path} stores {tensor.name} with shape {_show(tensor.shape)} instead of "
        f"{' or '.join(map(_show, dict.fromkeys(shapes)))}; the file contradicts its quantization_config"
    )


def _show(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def count_blocks(size: int, block: int) -> int:
    """Return the number of blocks in ``size``; a block of 0 means the whole."""
    return -(-size // block) if block else 1


def kernel_group(group: int, inputs: int, what: str) -> int:
    """Return the size of the groups in memory, for a file's groups of this size; 0 means one group for all inputs.

    A file's group becomes several groups with the same scale if our kernels do not have its size. Raises ``ModelError``
    for a size that is not a multiple of 16.
    """
    if group == 0 or group >= inputs:
        return GROUPS[-1]
    for size in reversed(GROUPS):
        if group % size == 0:
            return size
    raise ModelError(
        f"{what} has groups of {group} inputs; the kernels need a multiple of {GROUPS[0]}: use files with groups of "
        "32, 64 or 128, or the original with worker.weights"
    )
