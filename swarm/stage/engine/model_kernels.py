"""A model on a device, with the kernels that multiply in it: our own, or torch's where ours do not support it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from swarm.errors import ModelError, refusing_model
from swarm.log import get_logger
from swarm.stage import native
from swarm.stage.cuda.precision import use_full_precision
from swarm.stage.engine.kernel_report import describe_bits, describe_kernels
from swarm.stage.engine.selfcheck import Numerics, check_cut, check_device, check_kernels, same_bits
from swarm.stage.matmul.linears import QUANTIZED_KERNELS
from swarm.stage.model.adapter_folder import AdapterFolder
from swarm.stage.model.build import DTYPES, ModelSkeleton
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.fitting import check_files
from swarm.stage.model.loading import Modules
from swarm.stage.model.weight_formats import find_formats
from swarm.stage.modules.recurrent import has_attention, state_bytes
from swarm.stage.native.linears import NativeLinear
from swarm.wire.messages import Manifest, add_layer_bytes

log = get_logger(__name__)


class ModelKernels:
    """The skeleton of a checkpoint's model, the source and the formats of its weights, and the choice of kernels.

    Raises ``ModelError`` if the model cannot be cut, or if its kernels give wrong results on this machine.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype_name: str) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype_name = dtype_name
        if device.type == "cuda":
            use_full_precision()
        self._left_to_torch: set[str] = set()  # processor-dependent torch operations of everything loaded so far
        self._build_skeleton()
        check_cut(self.skeleton.config)
        # whether cut and whole models of this kind have the same bits
        self._same_bits_when_cut = device.type == "cpu" and self._prove_kernels()
        if device.type != "cpu":
            numerics = Numerics.of_model(self.skeleton, self.formats)
            check_device(self.skeleton.config, dtype_name, device, numerics)
        self._check_activations()

    def _build_skeleton(self) -> None:
        self.skeleton = ModelSkeleton.from_checkpoint(self._checkpoint, self._device, DTYPES[self._dtype_name])
        self.source = self.skeleton.source(self._checkpoint)
        with refusing_model():  # another worker with these files would refuse them, too
            check_files(self._checkpoint, self.skeleton, self.source)
        self.formats = find_formats(self.skeleton, self.source)

    def _prove_kernels(self) -> bool:
        """Choose our own kernels, or torch's if ours do not support the model. True if cut and whole have the same
        bits."""
        check_kernels(self.skeleton.config, self._dtype_name, Numerics.of_model(self.skeleton, self.formats))
        if native.unavailable_reason():
            log.warning("own_kernels_unused", why=native.unavailable_reason())
            self._build_skeleton()
        return same_bits(self.skeleton.config, self._dtype_name, Numerics.of_model(self.skeleton, self.formats))

    def _check_activations(self) -> None:
        """Raise ``ModelError`` if rows should be rounded to int8 and our kernels for CPUs do not multiply."""
        if self._checkpoint.has_int8_rows and not (self.are_own and self.skeleton.has_quantized_products):
            why = native.unavailable_reason() or f"they do not compute in {self._dtype_name} on {self._device}"
            raise ModelError(
                f"worker.activations = int8 needs Swarm's kernels, which this worker can't use ({why}); set it to auto "
                "for all workers"
            )

    @property
    def are_own(self) -> bool:
        """Whether our own kernels for CPUs multiply, not torch's or those of a GPU."""
        return self.skeleton.kernel is NativeLinear

    def scale_memory(self, num_bytes: int) -> int:
        """Return how much of the manifest's bytes this memory holds.

        The manifest has the packed sizes of quantized matrices. Without our kernels they are dequantized, so that the
        same layers take more memory; on a GPU, codes of 5 and 6 bits take a byte, and embeddings are dequantized.
        """
        if self.skeleton.has_quantized_products and self.are_own:
            return num_bytes
        on_gpu = self.skeleton.has_quantized_products
        return int(num_bytes * self._checkpoint.packed_share(self._dtype_name, on_gpu=on_gpu))

    def add_states(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the sizes of the layers' states."""
        layers: Any = self.skeleton.model.get_submodule(self.skeleton.parts.layers)
        sizes = state_bytes(layers)
        return manifest.with_states(sizes, tuple(map(has_attention, layers))) if sizes else manifest

    def add_adapters(self, manifest: Manifest, adapters: Sequence[AdapterFolder]) -> Manifest:
        """Return the manifest with these adapters. Raises ``ModelError`` if one can't change this model."""
        sizes = add_layer_bytes(manifest.layer_bytes, map(self.adapter_bytes, adapters))
        assets = tuple(adapter.asset() for adapter in adapters)
        return msgspec.structs.replace(manifest, layer_bytes=sizes, adapters=assets)

    def adapter_bytes(self, adapter: AdapterFolder) -> tuple[int, ...]:
        """Return the memory that an adapter takes, by layer. Raises ``ModelError`` if it can't change this model."""
        if self.skeleton.kernel not in QUANTIZED_KERNELS:
            why = native.unavailable_reason() or f"they do not compute in {self._dtype_name} on {self._device}"
            raise ModelError(f"adapters need Swarm's kernels, which this worker can't use ({why})")
        layers = self.skeleton.parts.layers
        adapter.check_model(self.skeleton.model, layers)
        return tuple(adapter.layer_bytes(layers, self.skeleton.num_layers, self.skeleton.dtype.itemsize))

    def add_left_to_torch(self, operations: Iterable[str]) -> None:
        """Record operations of loaded layers that torch computes as the processor decides."""
        self._left_to_torch |= set(operations)

    def describe(self, modules: Modules) -> tuple[str, str]:
        """Return the kernels that multiply in these modules, and whose bits they give."""
        left_to_torch = sorted(self._left_to_torch)
        kernels = describe_kernels(
            self.skeleton,
            modules.values(),
            left_to_torch,
            formats=self.formats,
            same_bits_when_cut=self._same_bits_when_cut,
        )
        return kernels, describe_bits(self.skeleton, left_to_torch, self.formats)
