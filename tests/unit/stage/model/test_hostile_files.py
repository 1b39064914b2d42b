"""Files of a model that somebody made to do harm: one error that names the file, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.text_tower import image_layers
from tests.files_of_models import TINY_CONFIG, entry, safetensors

TENSORS = ("embed.weight", "model.layers.0.q", "model.layers.1.q", "head.weight")
HOSTILE: tuple[Any, ...] = (None, True, 0, -1, 1 << 31, 1 << 63, 10**30, 1.5, "", "\ud800", "\0", [], [[]], ["\0"], {})


def folder_of(folder: Path, weights: bytes, config: dict[str, Any] = TINY_CONFIG, eos: object = 1) -> Path:
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def parts(weights: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(weights[:8], "little")
    return json.loads(weights[8 : 8 + size]), weights[8 + size :]


def whole(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


SIZE = len(parts(safetensors(*TENSORS))[1])
ENTRIES: dict[str, dict[str, object]] = {
    "overlapping": {"data_offsets": [32, 96]},
    "beyond the end": {"data_offsets": [SIZE, SIZE + 64]},
    "before the beginning": {"data_offsets": [-64, 0]},
    "backwards": {"data_offsets": [64, 0]},
    "another size than the shape": {"shape": [10**30, 10**30]},
    "another size than the dtype": {"dtype": "F64"},
    "a negative shape": {"shape": [-4, -4]},
    "no numbers": {"data_offsets": ["0", "64"]},
}


def doubled(weights: bytes) -> bytes:
    header, data = parts(weights)
    return whole(json.dumps(header)[:-1] + f', "{TENSORS[0]}": {json.dumps(entry(1))}}}', data)


def renamed(weights: bytes) -> bytes:
    header, data = parts(weights)
    header["\ud800"] = header.pop(TENSORS[0])
    return whole(json.dumps(header), data)


FILES: dict[str, Callable[[bytes], bytes]] = {
    "a name twice": doubled,
    "a name that is no text": renamed,
    "a header without an end": lambda weights: (1 << 62).to_bytes(8, "little") + weights[8:],
    "a deep header": lambda weights: whole("[" * 100_000, weights),
    "cut off": lambda weights: weights[:-1],
    "cut off in the header": lambda weights: weights[:20],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("how", ENTRIES)
def test_a_hostile_entry_of_a_header_is_refused(tmp_path: Path, how: str) -> None:
    header, data = parts(safetensors(*TENSORS))
    header[TENSORS[0]] |= ENTRIES[how]
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(folder_of(tmp_path, whole(json.dumps(header), data)))


@pytest.mark.parametrize("how", FILES)
def test_a_hostile_file_of_weights_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(folder_of(tmp_path, FILES[how](safetensors(*TENSORS))))


def test_the_same_weights_undamaged_are_taken(tmp_path: Path) -> None:
    header, data = parts(safetensors(*TENSORS))
    assert Checkpoint(folder_of(tmp_path, whole(json.dumps(header), data))).manifest("float32").num_layers == 2


@given(name=st.sampled_from(sorted({*TINY_CONFIG, "text_config", "head_dim"})), value=st.sampled_from(HOSTILE))
def test_a_hostile_setting_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    """Nothing but ModelError is raised, and nothing is allocated for a model of two thousand million layers."""
    folder = folder_of(tmp_path_factory.mktemp("model"), safetensors(*TENSORS), TINY_CONFIG | {name: value})
    try:
        manifest = Checkpoint(folder).manifest("float32")
    except ModelError:
        return
    msgspec.msgpack.encode(manifest)


@pytest.mark.parametrize("value", [3, "38", {}, [3, "8"], [None]], ids=str)
def test_layers_for_images_that_are_no_list_of_layers_are_refused(value: object) -> None:
    with pytest.raises(ModelError, match="no list of layers; download it again"):
        image_layers({"model_type": "mllama_text_model", "cross_attention_layers": value})


@pytest.mark.parametrize("value", HOSTILE, ids=str)
def test_what_can_t_end_an_answer_does_not(tmp_path: Path, value: object) -> None:
    checkpoint = Checkpoint(folder_of(tmp_path, safetensors(*TENSORS), eos=value))
    try:
        found = checkpoint.eos_token_ids
    except ModelError:  # of a file that is no text
        return
    assert all(0 <= token < 1 << 31 for token in found)
