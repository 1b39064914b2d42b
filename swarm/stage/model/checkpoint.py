"""A model's folder on disk: its contents, and which bytes belong to which part. No torch here.

The folder has the usual Hugging Face form: ``config.json``, weights in safetensors files (one, or shards with an
index), tokenizer files. The files' headers contain everything that a plan needs, so describing a model reads a few
kilobytes, however large it is. A stage reads exactly the bytes of its own tensors into its own memory; a mapped file
would count in full.

The folder of a model on a hub may lack weight files. Their contents are described by :class:`RemoteWeights`, and
:meth:`Checkpoint.fetch` downloads the files with the requested tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import xxhash

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel
from swarm.hub.headers import FLOAT_DTYPES, Progress, Report, StoredTensor
from swarm.stage.model.embedding import read_pooling
from swarm.stage.model.folder_files import RemoteWeights, read_json, read_tensors
from swarm.stage.model.gguf_names import GgufTensor, sort_tensors, translate_names
from swarm.stage.model.identity import compute_digest, compute_xxh3, describe_version, is_sampled
from swarm.stage.model.kinds import is_classifier
from swarm.stage.model.location import ModelLocation
from swarm.stage.model.model_settings import INDEXED_KINDS, MAX_SIZE, WIDE_KINDS, ModelSettings
from swarm.stage.model.sizes import (
    MemorySizes,
    SharedBlocks,
    find_head_sizes,
    find_key_heads,
    index_key_size,
    shared_sources,
)
from swarm.stage.model.text_tower import TEXT_ONLY, choose_names, image_layers, number_layers
from swarm.stage.model.vision import find_tower, read_vision, work_bytes
from swarm.stage.quantization.at_load import AS_STORED, HEAD, INT8, LAYER, Quantization
from swarm.stage.quantization.contents import check_contents
from swarm.stage.quantization.formats import supports_int8
from swarm.stage.quantization.search import find_quantized, read_quantization
from swarm.stage.quantization.stored import StoredWeight
from swarm.wire.messages import MAX_ASSET_BYTES, MAX_NAME, Asset, Manifest

# A model's head: over the vocabulary, over the labels of a classifier, or none.
HeadKind = Literal["vocabulary", "scores", "none"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Files that a client needs to turn text into tokens and back.
_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

_PREDICTION = re.compile(r"(?:model\.)?mtp\.")
_ZERO_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_HUB_CACHE_FOLDER = re.compile(r"models--.+?--(?P<name>.+)")


class Checkpoint(ModelSettings):
    """Description of a model folder, or of a model of GGUF files and the folder that was derived from it.

    ``tensors`` are the plain tensors and ``quantized`` the quantized matrices, by the names of a plain checkpoint;
    ``gguf`` has, by the same names, what must be undone when they are read. ``quantization``: how weights are quantized
    at load. ``images``: read the vision tower, if there is one. Raises ``ModelError`` with the file and the problem.
    """

    def __init__(
        self,
        folder: Path,
        remote: RemoteWeights | None = None,
        quantization: Quantization = AS_STORED,
        gguf: GgufModel | None = None,
        *,
        images: bool = True,
    ) -> None:
        super().__init__(folder)
        self._remote = remote
        self._gguf = gguf
        settings, self._settings_file = read_quantization(folder, self.config, read_json)
        self.quantization = quantization
        self.gguf: dict[str, GgufTensor] | None = None
        # quantized matrices, by the names of a plain checkpoint; they are not in ``tensors``
        self.quantized: dict[str, StoredWeight]
        if gguf is None:
            kind = str(self.text_config.get("model_type"))
            tensors = dict(read_tensors(folder, remote))
            plain_name: Callable[[str], str | None] = choose_names(tensors) if self.is_multimodal else str
            plain_name = number_layers(plain_name, image_layers(self.config))
            tower = find_tower(self.config, tensors) if images else {}
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if plain_name(name) and not self._is_of_prediction(name) and not self._is_zero_expert(name)
            }
            self.quantized, self.tensors = find_quantized(settings, tensors)
        else:
            kind = str(gguf.metadata["general.architecture"])
            self.gguf = translate_names(gguf, self.config["model_type"], self.num_layers)
            self.tensors, self.quantized = sort_tensors(self.gguf)
            tower = {}
        quantization.check_stored(self.quantized.values(), self.name)
        check_contents(self.quantized.values())
        chosen = quantization.choose_matrices(self.tensors.values(), self.quantized, kind, self.vocab_size)
        self._weights = shorten_name(quantization.describe(self.quantized.values(), chosen.values()))
        for name in chosen:
            del self.tensors[name]
        self.quantized |= chosen
        if gguf is None:
            self.tensors = {str(plain_name(name)): tensor for name, tensor in self.tensors.items()}
            renamed = [replace(weight, name=str(plain_name(weight.name))) for weight in self.quantized.values()]
            self.quantized = {weight.name: weight for weight in renamed}
        self.tensors |= tower
        self.vision = read_vision(folder, self.config) if tower else None

    def _is_of_prediction(self, name: str) -> bool:
        """Whether a tensor predicts several tokens at once (MTP), which is not used: it belongs to a layer that is
        stored after the model's own."""
        layer, num_more = LAYER.search(name), self.text_config.get("num_nextn_predict_layers")
        is_later = layer is not None and isinstance(num_more, int) and 0 <= int(layer[1]) - self.num_layers < num_more
        return is_later or _PREDICTION.match(name) is not None

    def _is_zero_expert(self, name: str) -> bool:
        """Whether a tensor is a matrix of an expert that gives back its input. transformers saves it, but never reads
        it."""
        match = _ZERO_EXPERT.search(name) if self.text_config.get("model_type") == "longcat_flash" else None
        return match is not None and int(match[1]) >= self._positive_setting("n_routed_experts")

    @classmethod
    def at(cls, location: ModelLocation, quantization: Quantization = AS_STORED, *, images: bool = True) -> Checkpoint:
        return cls(location.folder, location.remote, quantization, location.gguf, images=images)

    @property
    def name(self) -> str:
        """The model's name: that of its folder, or as its GGUF files are called."""
        return _model_name(self.folder) if self._gguf is None else self._gguf.name

    @cached_property
    def stored_dtype(self) -> str:
        """The dtype of most of the weights: ``float32``, ``bfloat16`` or ``float16``. Codes count as bfloat16."""
        weight = dict.fromkeys(FLOAT_DTYPES, 0)
        for tensor in self._stored_tensors():
            weight[tensor.dtype if tensor.is_float else "BF16"] += tensor.num_bytes
        return FLOAT_DTYPES[max(weight, key=lambda dtype: weight[dtype])]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        return sum(tensor.num_bytes for tensor in self._stored_tensors())

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        path = self.folder / "generation_config.json"
        generation = read_json(path) if path.is_file() else {}
        for source in (generation, self.config, self.text_config):
            value = source.get("eos_token_id")
            tokens = tuple(value) if isinstance(value, list) else (value,)
            if tokens and all(type(token) is int and 0 <= token <= MAX_SIZE for token in tokens):
                return tokens
        return ()

    @cached_property
    def head(self) -> HeadKind:
        """The kind of the model's head. An encoder's architecture, such as ``MistralModel``, may lack one; a tied head
        is not stored, but there."""
        if is_classifier(self.architecture):
            return "scores"
        is_base = (
            re.search(r"(?<!LMHead)Model$", self.architecture) and self.text_config.get("tie_word_embeddings") is False
        )
        return "none" if is_base and not any(map(HEAD.search, (*self.tensors, *self.quantized))) else "vocabulary"

    @property
    def num_labels(self) -> int:
        """Number of scores of the classification head; 0 if there is none."""
        if self.head != "scores":
            return 0
        for name, shape in self._stored_shapes():
            if name.endswith("score.weight") and len(shape) == 2:
                return shape[0]
        raise ModelError(f"{self.folder} is a classifier without score.weight; only a linear score can be served")

    def _stored_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((tensor.name, tensor.shape) for tensor in self.tensors.values())
        yield from ((weight.name, weight.shape) for weight in self.quantized.values())

    def manifest(self, dtype: str) -> Manifest:
        """Return the manifest that all processes must agree on, with sizes in memory when computing in ``dtype``."""
        parts = self._sizes.of_parts(DTYPE_BYTES[dtype], self.num_layers, self.folder)
        per_token = self.kv_numbers * DTYPE_BYTES[dtype]
        kv_bytes = self._layer_kv_bytes(per_token, DTYPE_BYTES[dtype])
        return Manifest(
            name=shorten_name(self.name),
            architecture=shorten_name(self.architecture + TEXT_ONLY) if self.is_text_only else self.architecture,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            context=self.context,
            eos_token_ids=self.eos_token_ids,
            dtype=dtype,
            layer_bytes=parts.layers,
            embed_bytes=parts.embed,
            head_bytes=parts.head,
            shared_bytes=parts.shared,
            kv_bytes_per_token=kv_bytes,
            files=self._files,
            assets=self.assets,
            weights=self._weights,
            activations=INT8 if self.has_int8_rows else "",
            is_headless=self.head != "vocabulary",
            num_labels=self.num_labels,
            vision=self.vision,
            image_bytes=0 if self.vision is None else work_bytes(self.config, self.vision, DTYPE_BYTES[dtype]),
            extra_width=self._extra_width([size // DTYPE_BYTES[dtype] for size in kv_bytes]),
            pooling=read_pooling(self.folder),
        )

    def check_layers(self) -> None:
        """Raise ``ModelError`` unless the files have all layers of the configuration, an embedding, and no more."""
        self._sizes.of_parts(DTYPE_BYTES["float32"], self.num_layers, self.folder)

    @property
    def is_text_only(self) -> bool:
        """Whether parts for images or audio are not loaded."""
        return self.is_multimodal and self.vision is None

    def _extra_width(self, kv_sizes: Sequence[int]) -> int:
        """Return how many numbers stages pass on beside a hidden state (``layer_inputs``). ``kv_sizes``: of keys and
        values, by layer."""
        text = self.text_config
        if self._shared_blocks is not None:
            return self.hidden_size
        if text.get("model_type") == "zaya":
            return int(text["router_hidden_size"])
        if text.get("model_type") in INDEXED_KINDS:
            selected = 2 * int(text["index_topk"]) if "shared" in (text.get("indexer_types") or ()) else 0
            return (int(text.get("hc_mult", 1)) - 1) * self.hidden_size + selected
        if text.get("model_type") not in WIDE_KINDS:
            return 0
        streams = (int(text.get("altup_num_inputs", 1)) - 1) * self.hidden_size
        shared = shared_sources(text["layer_types"], int(text["num_kv_shared_layers"]))
        inputs = self.num_layers * int(text.get("hidden_size_per_layer_input") or 0)
        return streams + inputs + sum(kv_sizes[layer] for layer in shared)

    def _layer_kv_bytes(self, usual: int, number_bytes: int) -> tuple[int, ...]:
        """Return each layer's bytes per position. Gemma 4 and MiMo give some layers heads of their own, and an index
        stores a key."""
        kv_bytes, text = [usual] * self.num_layers, self.text_config
        if text.get("index_head_dim") and text.get("kv_lora_rank") is not None:
            return tuple(number_bytes * self._latent_numbers(layer) for layer in range(self.num_layers))
        if text.get("model_type") == "mimo_v2_flash":
            size = sum(find_head_sizes(text.get, self.head_size)) * number_bytes
            return tuple(find_key_heads(text.get, layer) * size for layer in range(self.num_layers))
        own = text.get("per_layer_config") or {}
        if not own and text.get("global_head_dim"):
            heads = {"head_dim": text["global_head_dim"]}
            if text.get("attention_k_eq_v", True) and text.get("num_global_key_value_heads"):
                heads["num_key_value_heads"] = text["num_global_key_value_heads"]
            own = {n: heads for n, kind in enumerate(text.get("layer_types") or ()) if kind == "full_attention"}
        for layer, heads in own.items():
            num, size = heads.get("num_key_value_heads", self.num_kv_heads), heads.get("head_dim", self.head_size)
            kv_bytes[int(layer)] = 2 * num * size * number_bytes
        return tuple(kv_bytes)

    def _latent_numbers(self, layer: int) -> int:
        """Return how many numbers a layer stores of one position: a latent, a rotated key, and a key of its index."""
        by_layer = self.text_config.get("per_layer_config") or {}
        own = self.text_config | by_layer.get(layer, by_layer.get(str(layer), {}))
        return int(own["kv_lora_rank"] + own["qk_rope_head_dim"] + index_key_size(self.text_config.get, layer))

    @property
    def has_int8_rows(self) -> bool:
        """Whether rows are rounded to int8: by the settings, before products with matrices whose codes allow it."""
        how = self.quantization
        has_codes = any(supports_int8(weight.format) for weight in self.quantized.values())
        return how.has_int8_rows and not how.is_dense and has_codes

    @cached_property
    def assets(self) -> tuple[Asset, ...]:
        """The files that clients need."""
        present = [self.folder / name for name in _ASSETS if (self.folder / name).is_file()]
        for path in present:
            if path.stat().st_size > MAX_ASSET_BYTES:
                raise ModelError(
                    f"{path} has {path.stat().st_size} bytes; clients take at most {MAX_ASSET_BYTES}: make it smaller, "
                    "or remove it from the folder if the model is only used with token ids"
                )
        return tuple(Asset(path.name, path.stat().st_size, compute_xxh3(path)) for path in present)

    @cached_property
    def _files(self) -> tuple[Asset, ...]:
        """The files that define the model, with their digests (``identity``)."""
        paths = {tensor.path for tensor in self._stored_tensors()} | {self.folder / "config.json"}
        if self._settings_file is not None:
            paths.add(self._settings_file)
        # The order must not depend on where the files are: those of a GGUF model are in two folders.
        return tuple(self._describe_file(path) for path in sorted(paths, key=lambda path: path.name))

    def _describe_file(self, path: Path) -> Asset:
        described = self._remote.describe(path.name) if self._remote is not None else None
        if described is not None:
            return Asset(path.name, described.num_bytes, described.sha256)
        if not path.is_file():
            raise ModelError(f"{path} is missing; it was there before: download it again, and start again")
        return Asset(path.name, path.stat().st_size, compute_digest(path))

    def digest_files(self, weight: StoredWeight) -> str:
        """Return what identifies the contents of the files that hold a quantized matrix."""
        return " ".join(sorted({self._identities[part.path.name] for part in weight.parts.values()}))

    def describe_files(self) -> str:
        """Return what identifies the contents of all files that define the model, on this machine."""
        own = self._identities
        return "\n".join(f"{file.name} {own.get(file.name, file.digest)}" for file in self._files)

    @cached_property
    def _identities(self) -> dict[str, str]:
        """By file. A digest of samples may miss a change, so the times at which such a file was written belong to it:
        what this machine has packed from another version of the file must not be used."""
        paths = {tensor.path.name: tensor.path for tensor in self._stored_tensors()}
        return {
            file.name: f"{file.digest} {describe_version(paths[file.name])}" if is_sampled(file.digest) else file.digest
            for file in self._files
            if file.name in paths
        }

    def _stored_tensors(self) -> Iterator[StoredTensor]:
        """Yield all tensors of the files: plain ones and the parts of quantized matrices."""
        yield from self.tensors.values()
        for weight in self.quantized.values():
            yield from weight.parts.values()

    def _stored_parts(self, name: str) -> Collection[StoredTensor]:
        """Return the stored tensors of this name: a plain one, or the parts of a quantized matrix."""
        if name in self.quantized:
            return self.quantized[name].parts.values()
        return [self.tensors[name]] if name in self.tensors else []

    def _parts_of(self, names: Collection[str]) -> list[StoredTensor]:
        return [part for name in names for part in self._stored_parts(name)]

    def missing(self, names: Collection[str]) -> dict[str, int]:
        """Return how many bytes must be downloaded before these tensors can be read, by file."""
        tensors = self._parts_of(names)
        if self._remote is not None:
            return self._remote.missing(tensors)
        absent = sorted({tensor.path for tensor in tensors if not tensor.path.is_file()})
        return {path.name: self._describe_file(path).num_bytes for path in absent}

    def fetch(self, names: Collection[str], progress: Progress | None = None, report: Report | None = None) -> None:
        """Download what is missing of these tensors.

        ``progress`` is called regularly, even if no byte has arrived. Raises ``ModelError``; what was downloaded is
        kept.
        """
        if self._remote is not None:
            self._remote.fetch_tensors(self._parts_of(names), progress, report)

    @property
    def _sizes(self) -> MemorySizes:
        return MemorySizes(
            self.tensors, self.quantized, self.quantization.is_dense, self.vocab_size, self._shared_blocks
        )

    @property
    def _shared_blocks(self) -> SharedBlocks | None:
        text = self.text_config
        if text.get("model_type") not in ("zamba", "zamba2"):
            return None
        layers = tuple(layer for layer, kind in enumerate(text["layers_block_type"]) if kind == "hybrid")
        return SharedBlocks(layers, int(text.get("num_mem_blocks", 1)))

    def packed_share(self, dtype: str, *, on_gpu: bool = False) -> float:
        """Return the size of all weights by the manifest, over their size where quantized matrices are dequantized, or
        packed on a GPU."""
        element_bytes = DTYPE_BYTES[dtype]
        sizes = list(self._sizes.of_weights(element_bytes))
        dense = sum(math.prod(shape) * element_bytes for _, shape, _ in sizes)
        actual = dense - (self._sizes.saved_on_gpu(element_bytes) if on_gpu else 0)
        return sum(size for _, _, size in sizes) / actual


def _model_name(folder: Path) -> str:
    """Return the folder's name. In a hub's cache, where that is a commit, return the model's name, as a copy elsewhere
    is called."""
    cached = _HUB_CACHE_FOLDER.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return (cached["name"] if cached else folder.name) or "model"


def shorten_name(name: str) -> str:
    """Return a name for messages: a long name is shortened in the middle.

    A digest of the whole name keeps names apart that differ only in the middle. Bytes of a file's name that are not
    text become question marks.
    """
    name = name.encode("utf-8", "replace").decode("utf-8")
    if len(name) <= MAX_NAME:
        return name
    middle = f"…{xxhash.xxh3_64_hexdigest(name.encode())[:8]}…"
    rest = MAX_NAME - len(middle)
    return name[: rest - rest // 2] + middle + name[-(rest // 2) :]
