"""GGUF files as models: located, described, and refused before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.gguf_folder import derived_folders
from swarm.stage.model.gguf_names import NAMES
from swarm.stage.model.location import locate_model
from swarm.stage.quantization.formats import Codes, Minima, Scales
from tests.gguf_headers import VOCABULARY, llama_tensors, write_file

# By transformers' model type: the architecture in gguf's own table of names, if it has another name.
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))


def open_model(path: Path) -> Checkpoint:
    return Checkpoint.at(locate_model(str(path)))


@pytest.mark.parametrize("model_type", NAMES)
def test_names_are_those_of_the_gguf_package(model_type: str) -> None:
    """Their table names what converters read; every name of ours must lead to the same tensor."""
    architecture = next(
        arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES.get(model_type, model_type)
    )
    theirs = gguf.get_tensor_name_map(architecture, 1)
    for stored, module in NAMES[model_type].layer.items():
        if ".experts." in module or module.endswith("sinks"):
            assert stored in {each.partition("blk.{bid}.")[2] for each in gguf.TENSOR_NAMES.values()}
        else:
            assert theirs.get_name(f"model.layers.0.{module}") == f"blk.0.{stored}"


def test_a_file_is_described_without_its_data(tmp_path: Path) -> None:
    path = write_file(tmp_path / "Tiny-7B.Q4_K_M.gguf")
    location = locate_model(str(path))
    assert location.name == str(path)
    checkpoint = Checkpoint.at(location)
    manifest = checkpoint.manifest("float32")
    assert (manifest.name, manifest.num_layers, manifest.vocab_size) == ("Tiny-7B.Q4_K_M", 2, VOCABULARY)
    assert (manifest.architecture, manifest.context) == ("LlamaForCausalLM", 64)
    layer = sum(4 * size for size in (8, 64, 32, 32, 64, 8, 128, 128, 128))
    assert manifest.layer_bytes == (layer, layer)
    assert [file.name for file in manifest.files] == ["Tiny-7B.Q4_K_M.gguf", "config.json"]


def test_a_folder_with_one_model_stands_for_its_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.gguf")
    assert locate_model(str(tmp_path)).name == str(path)
    write_file(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="several GGUF models"):
        locate_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate_model(str(tmp_path)).gguf is None


def test_projectors_and_statistics_beside_a_model_do_not_count(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.gguf")
    for name in ("mmproj-model-f16.gguf", "model.imatrix.gguf"):
        (tmp_path / name).touch()
    assert locate_model(str(tmp_path)).name == str(path)


def test_a_misspelt_file_is_not_looked_up_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its form it could be a repository's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "sub").mkdir(parents=True)
    for model in ("models/foo.gguf", "models/sub/foo.gguf"):
        with pytest.raises(ModelError, match=rf"{Path(model).parent} has no foo\.gguf; it has no GGUF file"):
            locate_model(model)
    write_file(tmp_path / "models" / "Foo.gguf")
    with pytest.raises(ModelError, match=r"models has no foo\.gguf; it has Foo\.gguf"):
        locate_model("models/foo.gguf")


def test_copies_of_a_file_have_the_same_derived_files(tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder in (one, other):
        folder.mkdir()
        write_file(folder / "tiny.gguf")
    first, second = (open_model(folder / "tiny.gguf") for folder in (one, other))
    assert first.manifest("float32") == second.manifest("float32")
    assert first.folder == second.folder
    assert [path.name for path in derived_folders().iterdir()] == [first.folder.name]


def test_another_header_has_another_folder(tmp_path: Path) -> None:
    folders = {open_model(write_file(tmp_path / f"{eps}.gguf", layer_norm_rms_eps=eps)).folder for eps in (1e-5, 1e-6)}
    assert len(folders) == 2


@pytest.mark.parametrize("lost", ["config.json", "derived.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_an_incomplete_derived_folder_is_replaced(tmp_path: Path, lost: str, how: str) -> None:
    """As after a cleaner of temporary files, or a power cut."""

    def words(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"{letter}" for letter in "abcdefghijkl"])
        writer.add_token_scores([0.0] * VOCABULARY)

    path = write_file(tmp_path / "tiny.gguf", change=words)
    folder = open_model(path).folder
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert contents.keys() == {"config.json", "derived.json", "tokenizer.json", "tokenizer_config.json"}
    stamp = (folder / "config.json").stat().st_ino
    assert open_model(path).folder == folder
    assert (folder / "config.json").stat().st_ino == stamp
    (folder / lost).unlink() if how == "removed" else (folder / lost).write_bytes(b"")
    leftover = folder.parent / "partial-old"
    leftover.mkdir()
    os.utime(leftover, (1, 1))
    assert open_model(path).folder == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == contents
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_numbers_are_the_decimal_ones_of_the_original(tmp_path: Path) -> None:
    config = open_model(write_file(tmp_path / "tiny.gguf")).config
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 10000.0)


def with_quantized(kind: gguf.GGMLQuantizationType) -> Callable[[gguf.GGUFWriter], None]:
    import numpy as np

    def change(writer: gguf.GGUFWriter) -> None:
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((8, 256 // block * num_bytes), np.uint8)
        writer.add_tensor("blk.0.attn_v.weight", data, raw_dtype=kind)

    return change


def test_quantized_matrices_are_described_by_their_type(tmp_path: Path) -> None:
    tensors = {name: shape for name, shape in llama_tensors().items() if name != "blk.0.attn_v.weight"}
    change = with_quantized(gguf.GGMLQuantizationType.Q4_K)
    checkpoint = open_model(write_file(tmp_path / "tiny.gguf", tensors, change=change))
    weight = checkpoint.quantized["model.layers.0.self_attn.v_proj.weight"]
    form = weight.format
    assert (form.name, form.codes, form.group) == ("Q4_K", Codes.INT4, 32)
    assert (form.scales, form.minima, weight.shape) == (Scales.NESTED, Minima.NESTED, (8, 256))
    assert weight.name not in checkpoint.tensors


@pytest.mark.parametrize("kind", ["IQ4_XS", "IQ2_XXS", "Q2_K", "Q3_K", "TQ1_0", "NVFP4", "IQ4_NL"])
def test_an_unsupported_type_is_refused_by_name_with_a_remedy(tmp_path: Path, kind: str) -> None:
    tensors = {name: shape for name, shape in llama_tensors().items() if name != "blk.0.attn_v.weight"}
    change = with_quantized(gguf.GGMLQuantizationType[kind])
    path = write_file(tmp_path / "tiny.gguf", tensors, change=change)
    with pytest.raises(ModelError, match=rf"{kind}, which is not supported.*Q4_K_M"):
        open_model(path)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "output_norm.weight"])
def test_a_quantized_tensor_that_is_no_matrix_is_one_error(tmp_path: Path, name: str) -> None:
    import numpy as np

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, np.zeros(34, np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    tensors = {other: shape for other, shape in llama_tensors().items() if other != name}
    with pytest.raises(ModelError, match=r"tiny\.gguf stores model\..* of shape \[32\] as Q8_0.*download it again"):
        open_model(write_file(tmp_path / "tiny.gguf", tensors, change=change))


@pytest.mark.parametrize(
    ("settings", "change", "why"),
    [
        ({"block_count": None}, None, r"has no llama\.block_count"),
        ({"block_count": 0}, None, r"unusable value \(0\) of llama\.block_count"),
        ({"block_count": 4097}, None, r"unusable value \(4097\) of llama\.block_count"),
        ({"block_count": (1 << 31) - 1}, None, r"unusable value \(2147483647\) of llama\.block_count"),
        ({"block_count": 1}, None, r"has the tensor blk\.1\."),
        ({"rope_dimension_count": 2}, None, r"rope\.dimension_count = 2 is not supported"),
        ({"value_length": 2}, None, r"value_length = 2 is not supported"),
        ({"causal_attention": False}, None, r"attention\.causal = False"),
        ({"clamp_kqv": 8.0}, None, r"setting llama\.attention\.clamp_kqv is not supported"),
        ({"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, None, "longrope"),
        ({"layer_norm_rms_eps": float("nan")}, None, r"unusable value \(nan\)"),
        ({"eos_token_id": 99}, None, r"unusable value \(99\)"),
        ({}, lambda writer: writer.add_token_list([str(each) for each in range(99)]), "99 tokens"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, settings: dict[str, Any], change: Callable[[gguf.GGUFWriter], None] | None, why: str
) -> None:
    def changes(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2" if change else "no_vocab")
        if change:
            change(writer)

    path = write_file(tmp_path / "tiny.gguf", change=changes, **settings)
    with pytest.raises(ModelError, match=why):
        open_model(path)


def test_a_tensor_that_no_module_has_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "tiny.gguf", llama_tensors() | {"blk.0.attn_sub_norm.weight": (8,)})
    with pytest.raises(ModelError, match="attn_sub_norm"):
        open_model(path)


def test_another_architecture_is_refused_with_those_that_work(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mamba' are not supported.*llama, .*gpt-oss"):
        open_model(write_file(tmp_path / "tiny.gguf", architecture="mamba"))


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 5.0, 6000)]
)
def test_scaled_positions_of_llama_3_are_found_from_their_divisors(
    tmp_path: Path, factor: float, low: float, high: float, original: int
) -> None:
    """The file has the divisors only. Any parameters with the same divisors are right."""
    import math

    import numpy as np

    from swarm.stage.model.gguf_rope import _llama3_divisors

    values = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, "rope_theta": 500000.0}
    divisors = _llama3_divisors(values | {"original_max_position_embeddings": original}, 64)
    path = write_file(
        tmp_path / "tiny.gguf",
        change=lambda writer: writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32)),
        rope_freq_base=500000.0,
        key_length=64,
        value_length=64,
    )
    rope = open_model(path).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", factor)
    found = _llama3_divisors(rope, 64)
    assert all(math.isclose(one, two, rel_tol=1e-5) for one, two in zip(divisors, found, strict=True))
    if low == 1.0:
        assert (rope["high_freq_factor"], rope["original_max_position_embeddings"]) == (high, original)


def test_divisors_that_follow_no_rule_are_refused(tmp_path: Path) -> None:
    import numpy as np

    odd = np.array([1.0, 3.0], np.float32)
    path = write_file(
        tmp_path / "tiny.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", odd[::-1].copy())
    )
    with pytest.raises(ModelError, match="scales the rotary positions"):
        open_model(path)


def test_derived_files_are_written_once_and_whole(tmp_path: Path) -> None:
    checkpoint = open_model(write_file(tmp_path / "tiny.gguf"))
    written = (checkpoint.folder / "config.json").stat().st_mtime_ns
    assert open_model(tmp_path / "tiny.gguf").folder == checkpoint.folder
    assert (checkpoint.folder / "config.json").stat().st_mtime_ns == written
    assert json.loads((checkpoint.folder / "config.json").read_bytes())["model_type"] == "llama"


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SWARM_CACHE"):
        open_model(write_file(tmp_path / "tiny.gguf"))
