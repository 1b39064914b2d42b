"""A model's folder on disk: its contents, and which bytes belong to which part. No torch here.

The folder has the usual Hugging Face form: ``config.json``, weights in safetensors files (one, or shards with an
index), tokenizer files. The files' headers contain everything that a plan needs, so describing a model reads a few
kilobytes, however large it is. A stage reads exactly the bytes of its own tensors into its own memory; a mapped file
would count in full.

The folder of a model on a hub may lack weight files. Their contents are described by :class:`RemoteWeights`, and
:meth:`Checkpoint.fetch` downloads the files with the requested tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import xxhash

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel, part_names, read_gguf
from swarm.hub.headers import (
    FLOAT_DTYPES,
    INDEX,
    SINGLE,
    Progress,
    RemoteFile,
    Report,
    StoredTensor,
    read_header,
    remote_header,
)
from swarm.hub.names import parse_name
from swarm.stage.model.gguf_folder import derive_folder
from swarm.stage.model.gguf_names import GgufTensor, sort_tensors, translate_names
from swarm.stage.model.identity import compute_digest, compute_xxh3, describe_version, is_sampled
from swarm.stage.quantization.at_load import AS_STORED, HEAD, INT8, LAYER, Quantization
from swarm.stage.quantization.contents import check_contents
from swarm.stage.quantization.search import find_quantized, read_quantization
from swarm.stage.quantization.stored import StoredWeight
from swarm.wire.messages import MAX_ASSET_BYTES, MAX_NAME, Asset, Manifest
from swarm.wire.messages.common import MAX_LAYERS

__all__ = ["Checkpoint", "ModelLocation", "RemoteWeights", "StoredTensor", "locate_model"]

_MAX_SIZE = (1 << 31) - 1  # upper bound of every size in a configuration
_MAX_HEADS = 1 << 20  # upper bound of the number of heads, and of a head's size
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Files that a client needs to turn text into tokens and back.
_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

_GATE_OR_UP = re.compile(r"(?P<path>.*\.mlp\.)(?P<part>gate|up)_proj\.weight")
_HUB_CACHE_FOLDER = re.compile(r"models--.+?--(?P<name>.+)")


class RemoteWeights(Protocol):
    """Source of the weight files that a folder lacks."""

    @property
    def name(self) -> str:
        """A name by which other processes, also on other machines, find exactly this model."""

    def describe(self, file: str) -> RemoteFile | None:
        """Return the description of a weight file without its data; None if there is none."""

    def missing(self, tensors: Collection[StoredTensor]) -> dict[str, int]:
        """Return how many bytes must be downloaded before these tensors can be read, by file."""

    def fetch_tensors(
        self, tensors: Collection[StoredTensor], progress: Progress | None = None, report: Report | None = None
    ) -> None:
        """Download what is missing of these tensors: their files, or their parts of files. Raises ``ModelError``."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Location of a model. Without ``remote``, the folder is complete.

    The weights of a model of GGUF files are in these, and the folder has what is derived from their header.
    """

    folder: Path
    remote: RemoteWeights | None = None
    gguf: GgufModel | None = None

    @property
    def name(self) -> str:
        """A name for other processes instead of the user's input: it always means the same files."""
        if self.gguf is not None and self.remote is None:
            return str(self.gguf.files[0].path)
        return str(self.folder) if self.remote is None else self.remote.name


def locate_model(model: str, report: Report | None = None) -> ModelLocation:
    """Return the location of ``model``: a local folder, a GGUF file (one of its parts is enough) or, for a name such
    as owner/model, the folder in the hub's cache.

    For a name, missing small files are fetched from the hub; of the weights, only the descriptions. ``report`` is
    called with a line of text about anything that takes long. Raises ``ModelError``.
    """
    path, name = Path(model).expanduser(), parse_name(model)
    if path.is_dir():
        file = _find_gguf(path)
        return ModelLocation(path.resolve()) if file is None else _locate_gguf(file)
    if path.suffix == ".gguf" and (name is None or path.exists()):
        return _locate_gguf(path)
    if path.exists():
        raise ModelError(
            f"{model} is neither a directory nor a .gguf file; name the directory that holds config.json and the "
            "safetensors files, or a GGUF file"
        )
    if name is None:
        raise ModelError(f"there is no directory {model}; name a model's directory, or a model on a hub as owner/model")
    try:
        from swarm.hub.gguf_snapshot import GgufSnapshot  # noqa: PLC0415 (slow to load, and seldom needed)
        from swarm.hub.lookup import look_up  # noqa: PLC0415
    except ImportError:
        raise ModelError(f"there is no directory {model}; to fetch it from a hub, install swarm[worker]") from None
    snapshot = look_up(name, report)
    if isinstance(snapshot, GgufSnapshot):
        gguf = read_gguf(snapshot.path)
        return ModelLocation(derive_folder(gguf), snapshot, gguf)
    return ModelLocation(snapshot.folder, snapshot)


def _locate_gguf(file: Path) -> ModelLocation:
    gguf = read_gguf(file.absolute())  # the hub's cache has links to files without names
    return ModelLocation(derive_folder(gguf), gguf=gguf)


def _find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file, or the first part, in a folder that has no configuration of its own.

    Raises ``ModelError`` if there is a choice.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files or (folder / "config.json").is_file():
        return None
    if {file.name for file in files} != set(part_names(files[0].name)):
        raise ModelError(f"{folder} has several GGUF models; name one of them: {', '.join(f.name for f in files[:9])}")
    return files[0]


class Checkpoint:
    """Description of a model folder, or of a model of GGUF files and the folder that was derived from it.

    ``tensors`` are the plain tensors and ``quantized`` the quantized matrices, by the names of a plain checkpoint;
    ``gguf`` has, by the same names, what must be undone when they are read. ``quantization``: how weights are quantized
    at load. Raises ``ModelError`` with the file and the problem.
    """

    def __init__(
        self,
        folder: Path,
        remote: RemoteWeights | None = None,
        quantization: Quantization = AS_STORED,
        gguf: GgufModel | None = None,
    ) -> None:
        self.folder = folder
        self._remote = remote
        self._gguf = gguf
        self.config = _read_json(folder / "config.json", "a model folder needs it")
        settings, self._settings_file = read_quantization(folder, self.config, _read_json)
        self.quantization = quantization
        inner = self.config.get("text_config")
        self.text_config: dict[str, Any] = inner if isinstance(inner, dict) and inner else self.config
        self.gguf: dict[str, GgufTensor] | None = None
        # quantized matrices, by the names of a plain checkpoint; they are not in ``tensors``
        self.quantized: dict[str, StoredWeight]
        if gguf is None:
            kind = str(self.text_config.get("model_type"))
            self.quantized, self.tensors = find_quantized(settings, dict(_read_tensors(folder, remote)))
        else:
            kind = str(gguf.metadata["general.architecture"])
            self.gguf = translate_names(gguf, self.config["model_type"], self.num_layers)
            self.tensors, self.quantized = sort_tensors(self.gguf)
        quantization.check_stored(self.quantized.values(), self._name)
        check_contents(self.quantized.values())
        chosen = quantization.choose_matrices(self.tensors.values(), self.quantized, kind, self.vocab_size)
        self._weights = shorten_name(quantization.describe(self.quantized.values(), chosen.values()))
        for name in chosen:
            del self.tensors[name]
        self.quantized |= chosen

    @classmethod
    def at(cls, location: ModelLocation, quantization: Quantization = AS_STORED) -> Checkpoint:
        return cls(location.folder, location.remote, quantization, location.gguf)

    @property
    def _name(self) -> str:
        return _model_name(self.folder) if self._gguf is None else self._gguf.name

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or [self.config.get("model_type")]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ModelError(f"{self.folder / 'config.json'} names no architecture; is this a language model's folder?")
        return names[0]

    @property
    def num_layers(self) -> int:
        return self._positive_setting("num_hidden_layers", "n_layer", "num_layers", most=MAX_LAYERS)

    @property
    def hidden_size(self) -> int:
        return self._positive_setting("hidden_size", "n_embd", "d_model")

    @property
    def vocab_size(self) -> int:
        return self._positive_setting("vocab_size")

    @property
    def context(self) -> int:
        return self._positive_setting("max_position_embeddings", "n_positions", "seq_length")

    @property
    def num_kv_heads(self) -> int:
        return self._positive_setting("num_key_value_heads", "num_attention_heads", "n_head", most=_MAX_HEADS)

    @property
    def head_size(self) -> int:
        if isinstance(self.text_config.get("head_dim"), int):
            return self._positive_setting("head_dim", most=_MAX_HEADS)
        return self.hidden_size // self._positive_setting("num_attention_heads", "n_head")

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
        generation = _read_json(path) if path.is_file() else {}
        for source in (generation, self.config, self.text_config):
            value = source.get("eos_token_id")
            tokens = tuple(value) if isinstance(value, list) else (value,)
            if tokens and all(type(token) is int and 0 <= token <= _MAX_SIZE for token in tokens):
                return tokens
        return ()

    def manifest(self, dtype: str) -> Manifest:
        """Return the manifest that all processes must agree on, with sizes in memory when computing in ``dtype``."""
        parts = self._part_sizes(DTYPE_BYTES[dtype])
        per_token = 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[dtype]
        return Manifest(
            name=shorten_name(self._name),
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
            shared_bytes=parts.shared,
            kv_bytes_per_token=(per_token,) * self.num_layers,
            files=self._files,
            assets=self.assets,
            weights=self._weights,
            activations=INT8 if self.quantization.has_int8_rows else "",
        )

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

    def _part_sizes(self, element_bytes: int) -> _PartSizes:
        layers = [0] * self.num_layers
        head = 0
        tables: list[tuple[bool, int]] = []  # whether it is the head, and its size
        for name, shape, size in self._memory_sizes(element_bytes):
            match = LAYER.search(name)
            if match:
                index = int(match[1])
                if index >= self.num_layers:
                    raise ModelError(f"{self.folder} has {name}, but config.json has {self.num_layers} layers")
                layers[index] += size
            elif shape[:1] == (self.vocab_size,) and len(shape) == 2:
                tables.append((HEAD.search(name) is not None, size))
            else:
                head += size
        for index, size in enumerate(layers):
            if size == 0:
                raise ModelError(f"{self.folder} has no weights for layer {index}; download the missing files again")
        if tables:
            # A plain tied table is loaded twice even by a stage with both ends: once for lookups, and once packed for
            # its kernel. Lookups in a quantized one read what is packed for the kernel.
            tables.sort()
            shared = tables[0][1] if len(tables) == 1 and self._packs_table else 0
            return _PartSizes(tuple(layers), tables[0][1], head + tables[-1][1], shared)
        raise ModelError(f"{self.folder} has no embedding of {self.vocab_size} tokens; is this a language model?")

    @property
    def _packs_table(self) -> bool:
        """Whether a table of the vocabulary is quantized in memory."""
        weights = () if self.quantization.is_dense else self.quantized.values()
        return any(weight.shape[0] == self.vocab_size and not LAYER.search(weight.name) for weight in weights)

    def packed_share(self, dtype: str) -> float:
        """Return the size of all weights by the manifest, over their size where quantized matrices are dequantized."""
        element_bytes = DTYPE_BYTES[dtype]
        sizes = list(self._memory_sizes(element_bytes))
        dense = sum(math.prod(shape) * element_bytes for _, shape, _ in sizes)
        return sum(size for _, _, size in sizes) / dense

    def _memory_sizes(self, element_bytes: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yield the names, shapes and sizes in memory of all weights."""
        for tensor in filter(lambda tensor: tensor.is_float, self.tensors.values()):
            yield tensor.name, tensor.shape, tensor.num_elements * element_bytes
        for weight in self.quantized.values():
            is_dense = self.quantization.is_dense or self._is_unpacked(weight)
            size = math.prod(weight.shape) * element_bytes if is_dense else weight.packed_bytes
            yield weight.name, weight.shape, size

    def _is_unpacked(self, weight: StoredWeight) -> bool:
        """Whether a matrix is dequantized because it can't be packed with the one that it is multiplied with in one
        pass: gate and up of unlike formats."""
        match = _GATE_OR_UP.fullmatch(weight.name)
        if match is None:
            return False
        name = match["path"] + ("up" if match["part"] == "gate" else "gate") + "_proj.weight"
        other = self.quantized.get(name)
        return name in self.tensors or (other is not None and other.format != weight.format)

    def _positive_setting(self, *names: str, most: int = _MAX_SIZE) -> int:
        """Return the first of these settings that the configuration has, as a positive integer."""
        for name in names:
            value = self.text_config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
                return value
        raise ModelError(f"{self.folder / 'config.json'} has no usable {names[0]}; is this a language model's folder?")


@dataclass(frozen=True, slots=True)
class _PartSizes:
    layers: tuple[int, ...]
    embed: int
    head: int
    shared: int  # bytes of both the embedding and the head that a stage with both holds once


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


def _read_json(path: Path, why: str = "") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is not valid text
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; {why or 'download it again'}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return content


def _read_tensors(folder: Path, remote: RemoteWeights | None) -> Iterator[tuple[str, StoredTensor]]:
    index_path = folder / INDEX
    if not index_path.is_file():
        yield from ((tensor.name, tensor) for tensor in _tensors_of(folder / SINGLE, remote))
        return
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_path} has no weight_map; download it again")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index_path} names {shard!r}, which is not a file name in the same folder")
        tensors = {tensor.name: tensor for tensor in _tensors_of(folder / shard, remote)}
        for name in (name for name, home in weight_map.items() if home == shard):
            if name not in tensors:
                raise ModelError(f"{folder / shard} lacks tensor {name}, which the index puts there; download it again")
            yield name, tensors[name]


def _tensors_of(path: Path, remote: RemoteWeights | None) -> Iterator[StoredTensor]:
    if path.is_file():
        return read_header(path)
    described = remote.describe(path.name) if remote is not None else None
    if described is not None:
        return remote_header(path, described)
    if path.name == SINGLE:
        raise ModelError(f"{path.parent} has no {SINGLE} and no index of shards; only safetensors are read")
    raise ModelError(f"{path} is missing; download it again")
