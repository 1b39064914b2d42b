"""A model's folder on disk: what is in it and which bytes belong to which part. No torch in here.

A folder in the ordinary Hugging Face form: ``config.json``, weights in safetensors files (one, or shards with an
index), tokenizer files. A safetensors file is eight bytes of length, that many bytes of JSON (name → dtype, shape,
offsets), then raw little-endian data. The headers alone tell everything that a plan needs, so describing a model reads
a few kilobytes however large it is; and a stage reads exactly the bytes of its own tensors into memory of its own,
where a mapped file would count in full.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from swarm.errors import ModelError
from swarm.wire.messages import Asset, Manifest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as stored: as computed with
_ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit

# What a client needs to turn text into tokens and back.
_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

# A file up to this size is hashed whole. Of a larger one, the header and evenly spread pieces are: enough to tell two
# checkpoints apart, and a worker that needs a tenth of 100 GB doesn't read all of it to say hello.
_WHOLE_HASH_BYTES = 64 << 20
_NUM_PIECES = 256
_PIECE_BYTES = 16 << 10

_HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_HUB_CACHE_FOLDER = re.compile(r"models--.+?--(?P<name>.+)")

_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")


def resolve(model: str, report: Callable[[str], None] | None = None) -> Path:
    """The folder that ``model`` names: a local one, or of a name such as owner/model, the one in the hub's cache.

    What the cache lacks is fetched from the hub, and ``report`` told so, line by line. Raises ModelError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelError(f"{model} is a file; name the directory that holds config.json and the safetensors files")
    named = _HUB_NAME.fullmatch(model)
    if named is None:
        raise ModelError(f"there is no directory {model}; name a model's directory, or a model on a hub as owner/model")
    try:
        from swarm.hub import fetch  # noqa: PLC0415 (slow to load, and seldom needed)
    except ImportError:
        raise ModelError(f"there is no directory {model}; to fetch it from a hub, install swarm[worker]") from None
    return fetch(named["repository"], named["revision"], report=report)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are. ``dtype`` is the safetensors name, such as BF16."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS


class Checkpoint:
    """A model folder, described. Raises ModelError that names the file and what is wrong with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / "config.json", "a model folder needs it")
        if "quantization_config" in self.config:
            raise ModelError(f"{folder} is quantized, which is not supported; use its float32 or bfloat16 original")
        self.tensors = dict(_read_tensors(folder))
        self.text_config: dict[str, Any] = self.config.get("text_config") or self.config

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or [self.config.get("model_type")]
        if not names or not isinstance(names[0], str):
            raise ModelError(f"{self.folder / 'config.json'} names no architecture; is this a language model's folder?")
        return names[0]

    @property
    def num_layers(self) -> int:
        return self._whole("num_hidden_layers", "n_layer", "num_layers")

    @property
    def hidden_size(self) -> int:
        return self._whole("hidden_size", "n_embd", "d_model")

    @property
    def vocab_size(self) -> int:
        return self._whole("vocab_size")

    @property
    def context(self) -> int:
        return self._whole("max_position_embeddings", "n_positions", "seq_length")

    @property
    def num_kv_heads(self) -> int:
        return self._whole("num_key_value_heads", "num_attention_heads", "n_head")

    @property
    def head_size(self) -> int:
        if isinstance(self.text_config.get("head_dim"), int):
            return int(self.text_config["head_dim"])
        return self.hidden_size // self._whole("num_attention_heads", "n_head")

    @cached_property
    def stored_dtype(self) -> str:
        """The dtype of most of the weights: ``float32``, ``bfloat16`` or ``float16``."""
        weight = dict.fromkeys(_FLOATS, 0)
        for tensor in self.tensors.values():
            if tensor.is_float:
                weight[tensor.dtype] += tensor.num_bytes
        return _FLOATS[max(weight, key=lambda dtype: weight[dtype])]

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        path = self.folder / "generation_config.json"
        generation = _read_json(path, "") if path.is_file() else {}
        for source in (generation, self.config, self.text_config):
            value = source.get("eos_token_id")
            if isinstance(value, int):
                return (value,)
            if isinstance(value, list) and value:
                return tuple(int(token) for token in value)
        return ()

    def manifest(self, dtype: str) -> Manifest:
        """What everybody must agree on, with sizes in memory when computing in ``dtype``."""
        parts = self._part_sizes(DTYPE_BYTES[dtype])
        per_token = 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[dtype]
        return Manifest(
            name=_name_of(self.folder),
            architecture=self.architecture,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            context=self.context,
            eos_token_ids=self.eos_token_ids,
            dtype=dtype,
            layer_bytes=parts.layers,
            embed_bytes=parts.embed,
            head_bytes=parts.head,
            kv_bytes_per_token=(per_token,) * self.num_layers,
            files=self._hashes,
            assets=self.assets,
        )

    @cached_property
    def assets(self) -> tuple[Asset, ...]:
        """The files that clients need."""
        present = [self.folder / name for name in _ASSETS if (self.folder / name).is_file()]
        return tuple(Asset(path.name, path.stat().st_size, _hash_file(path)) for path in present)

    @cached_property
    def _hashes(self) -> tuple[Asset, ...]:
        paths = sorted({tensor.path for tensor in self.tensors.values()} | {self.folder / "config.json"})
        return tuple(Asset(path.name, path.stat().st_size, _hash_file(path)) for path in paths)

    def _part_sizes(self, element_bytes: int) -> _PartSizes:
        layers = [0] * self.num_layers
        head = 0
        tables: list[int] = []
        for tensor in filter(lambda tensor: tensor.is_float, self.tensors.values()):
            size = tensor.num_elements * element_bytes
            found = _LAYER_NAME.search(tensor.name)
            if found:
                index = int(found[1])
                if index >= self.num_layers:
                    raise ModelError(
                        f"{tensor.path.name} has {tensor.name}, but config.json says {self.num_layers} layers"
                    )
                layers[index] += size
            elif tensor.shape[:1] == (self.vocab_size,) and len(tensor.shape) == 2:
                tables.append(size)
            else:
                head += size
        for index, size in enumerate(layers):
            if size == 0:
                raise ModelError(f"{self.folder} has no weights for layer {index}; download the missing files again")
        if tables:
            # A tied table is loaded twice even by a stage that has both ends: looked up in, and packed for its kernel.
            return _PartSizes(tuple(layers), tables[0], head + tables[-1])
        raise ModelError(f"{self.folder} has no embedding of {self.vocab_size} tokens; is this a language model?")

    def _whole(self, *names: str) -> int:
        """The first of these settings that the configuration has."""
        for name in names:
            value = self.text_config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ModelError(f"{self.folder / 'config.json'} has no usable {names[0]}; is this a language model's folder?")


@dataclass(frozen=True, slots=True)
class _PartSizes:
    layers: tuple[int, ...]
    embed: int
    head: int


def _name_of(folder: Path) -> str:
    """The folder's own name; in a hub's cache, where that is a number, the model's, as a copy elsewhere is called."""
    cached = _HUB_CACHE_FOLDER.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return (cached["name"] if cached else folder.name) or "model"


def _read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; {why or 'download it again'}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return content


def _read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{folder} has no model.safetensors and no index of shards; only safetensors are read")
        yield from ((tensor.name, tensor) for tensor in _read_header(single))
        return
    weight_map = _read_json(index_path, "").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_path} has no weight_map; download it again")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index_path} names {shard!r}, which is not a file name in the same folder")
        found = {tensor.name: tensor for tensor in _read_header(folder / shard)}
        for name in (name for name, home in weight_map.items() if home == shard):
            if name not in found:
                raise ModelError(f"{folder / shard} lacks tensor {name}, which the index puts there; download it again")
            yield name, found[name]


def _read_header(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, every bound checked against the file's size."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path} is not a complete safetensors file; download it again")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download it again") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has a damaged header ({error}); download it again") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header; download it again")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _stored_tensor(path, name, entry, 8 + length, size)


def _stored_tensor(path: Path, name: str, entry: object, base: int, file_size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
            isinstance(extent, int) and extent >= 0 for extent in shape
        ):
            pass
        case _:
            raise ModelError(f"{path} describes tensor {name} wrongly; download it again")
    if not 0 <= start <= stop or stop - start != math.prod(shape) * _ELEMENT_BYTES.get(dtype, 1):
        raise ModelError(f"{path} describes tensor {name} with a size that doesn't fit its shape; download it again")
    if base + stop > file_size:
        raise ModelError(f"{path} ends before tensor {name}; the file is cut off, download it again")
    return StoredTensor(name, path, dtype, tuple(shape), base + start, stop - start)


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_HASH_BYTES:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            digest.update(size.to_bytes(8, "little"))
            for number in range(_NUM_PIECES):
                file.seek((size - _PIECE_BYTES) * number // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
