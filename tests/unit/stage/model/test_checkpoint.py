"""A model's folder: what ends an answer, and what its parts weigh; without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swarm.errors import ModelError
from swarm.stage.model import identity
from swarm.stage.model.checkpoint import Checkpoint
from tests.files_of_models import TINY_CONFIG, safetensors

LAYERS = ("model.layers.0.q", "model.layers.1.q")


def model(folder: Path, *tensors: str, **config: object) -> Checkpoint:
    (folder / "model.safetensors").write_bytes(safetensors(*tensors))
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | config))
    return Checkpoint(folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (7, 8, (7,)),
        ([7, 9], 8, (7, 9)),
        ([], 8, (8,)),
        (None, [8], (8,)),
        (None, None, ()),
        ("seven", 8, (8,)),
    ],
)
def test_what_ends_an_answer(tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]) -> None:
    """As the settings for generation have it, or the model's own, where they say nothing that can be used."""
    found = model(tmp_path, "embed.weight", *LAYERS, "head.weight", eos_token_id=config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert found.eos_token_ids == expected


@pytest.mark.parametrize("tables", [("embed.weight", "head.weight"), ("embed.weight",)])
def test_what_the_parts_weigh(tmp_path: Path, tables: tuple[str, ...]) -> None:
    """One table serves at both ends, and is loaded twice."""
    found = model(tmp_path, *tables, *LAYERS)
    manifest = found.manifest("bfloat16")
    assert (manifest.layer_bytes, manifest.embed_bytes, manifest.head_bytes) == ((32, 32), 32, 32)
    more = model(tmp_path, *tables, *LAYERS, "model.layers.0.k").manifest("float32")
    assert (more.layer_bytes, more.embed_bytes, more.head_bytes) == ((128, 64), 64, 64)


def test_layers_that_predict_several_tokens_are_ignored(tmp_path: Path) -> None:
    """They are stored behind the model's own, or beside them, and take no memory."""
    own = ("embed.weight", *LAYERS)
    expected = model(tmp_path, *own).manifest("bfloat16")
    more = [*own, "model.layers.2.q", "model.layers.2.shared_head.head.weight", "mtp.fc.weight", "mtp.layers.0.q"]
    found = model(tmp_path, *more, num_nextn_predict_layers=1)
    assert found.manifest("bfloat16").layer_bytes == expected.layer_bytes
    assert found.manifest("bfloat16").head_bytes == expected.head_bytes
    assert list(found.tensors) == list(own)
    with pytest.raises(ModelError, match="json has 2 layers"):
        model(tmp_path, *more, "model.layers.3.q", num_nextn_predict_layers=1).manifest("bfloat16")


def test_a_latent_is_stored_once(tmp_path: Path) -> None:
    """As many numbers of a position as a latent and a rotated key have, whatever the heads."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 128}
    for dtype, num_bytes in (("bfloat16", 2), ("float32", 4)):
        manifest = model(tmp_path, "embed.weight", *LAYERS, **latent).manifest(dtype)
        assert manifest.kv_bytes_per_token == (576 * num_bytes,) * 2


def test_a_model_without_tables_is_none(tmp_path: Path) -> None:
    """Nor one that lacks a layer, or has one too many."""
    with pytest.raises(ModelError, match="has no embedding of 5 tokens"):
        model(tmp_path, "embed.weight", *LAYERS, vocab_size=5).manifest("float32")
    with pytest.raises(ModelError, match="has no weights for layer 1"):
        model(tmp_path, "embed.weight", LAYERS[0]).manifest("float32")
    with pytest.raises(ModelError, match="json has 1 layers"):
        model(tmp_path, "embed.weight", *LAYERS, num_hidden_layers=1).manifest("float32")


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    """The error tells a model in another form from one of which a part was not fetched."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    with pytest.raises(ModelError, match="and no index of shards"):
        _ = Checkpoint(tmp_path).tensors
    index = {"weight_map": {"embed.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"a\.safetensors is missing; download it again"):
        _ = Checkpoint(tmp_path).tensors


def test_a_large_file_that_was_edited_between_its_samples_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is of pieces, so the digest stays, and only the time of writing shows the change."""
    monkeypatch.setattr(identity, "MAX_WHOLE_BYTES", 16)
    monkeypatch.setattr(identity, "_PIECE_BYTES", 1)
    monkeypatch.setattr(identity, "_NUM_PIECES", 2)
    path, tensors = tmp_path / "model.safetensors", ("embed.weight", *LAYERS, "head.weight")
    before = model(tmp_path, *tensors)
    files = before.describe_files()
    assert files == Checkpoint(tmp_path).describe_files()
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\7")
    os.utime(path, (1, 1))
    after = Checkpoint(tmp_path)
    assert after.manifest("float32").files == before.manifest("float32").files
    assert after.describe_files() != files
