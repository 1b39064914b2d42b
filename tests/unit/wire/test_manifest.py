"""Which models are the same."""

from __future__ import annotations

import msgspec
import pytest

from swarm.testing import fake_manifest
from swarm.wire.messages import Asset

SHA256, OTHER_SHA256, SAMPLED = "a" * 64, "b" * 64, "c" * 32


def file(digest: str, num_bytes: int = 100, name: str = "model.safetensors") -> Asset:
    return Asset(name, num_bytes, digest)


def test_the_name_is_only_a_name() -> None:
    """A copy of the same files in another folder is the same model."""
    manifest = fake_manifest(num_layers=4)
    assert manifest.difference(msgspec.structs.replace(manifest, name="copy")) is None


def test_the_field_that_differs_is_named() -> None:
    """With both values."""
    manifest = fake_manifest(num_layers=4)
    other = msgspec.structs.replace(manifest, dtype="float64")
    assert manifest.difference(other) == f"dtype: {manifest.dtype} here, float64 there"


def test_the_same_model_in_another_dtype() -> None:
    """Its sizes differ, too; with another file it is another model."""
    manifest = fake_manifest(num_layers=4)
    other = msgspec.structs.replace(manifest, dtype="bfloat16", layer_bytes=(1,) * 4, kv_bytes_per_token=(2,) * 4)
    assert manifest.differs_only_in_dtype(other)
    assert not manifest.differs_only_in_dtype(manifest)
    assert not manifest.differs_only_in_dtype(msgspec.structs.replace(other, files=(file(SHA256),)))


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ((file(SHA256),), (file(OTHER_SHA256),), "files: model.safetensors differ in size or content"),
        ((file(SHA256),), (), "files: model.safetensors differ in size or content"),
        ((file(SHA256),), (file(SAMPLED, 99),), "files: model.safetensors differ in size or content"),
        ((file(SHA256),), (file(SAMPLED),), "files: model.safetensors can't be compared: one side has them from a hub"),
        (
            (file(SHA256), file(SHA256, name="other")),
            (file(SAMPLED), file(OTHER_SHA256, name="other")),
            "files: model.safetensors, other differ in size or content",
        ),
    ],
)
def test_files(mine: tuple[Asset, ...], theirs: tuple[Asset, ...], words: str) -> None:
    """Other weights are another model. A large file that a hub names and a plain copy of it can't be compared; that is
    said only if nothing is known to differ."""
    manifest = fake_manifest(num_layers=4)
    one, two = (msgspec.structs.replace(manifest, files=files) for files in (mine, theirs))
    difference = one.difference(two)
    assert difference is not None
    assert difference.startswith(words)


def test_the_same_model_quantized_otherwise() -> None:
    """Weights or activations, in whatever dtype; with another file it is another model."""
    manifest = fake_manifest(num_layers=4)
    int4 = msgspec.structs.replace(manifest, weights="int4", layer_bytes=(1,) * 4)
    for other in (
        int4,
        msgspec.structs.replace(int4, dtype="bfloat16"),
        msgspec.structs.replace(manifest, activations="int8"),
    ):
        assert manifest.differs_only_in_weights(other)
        assert not manifest.differs_only_in_dtype(other)
        assert not manifest.differs_only_in_weights(msgspec.structs.replace(other, files=(file(SHA256),)))
    assert not manifest.differs_only_in_weights(msgspec.structs.replace(manifest, dtype="bfloat16"))
    assert not int4.differs_only_in_weights(int4)
    assert int4.differs_only_in_dtype(msgspec.structs.replace(int4, dtype="bfloat16"))
