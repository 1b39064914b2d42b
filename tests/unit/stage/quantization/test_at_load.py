"""Quantization at load: which matrices, in which formats, with which sizes, and what is refused; without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.broker.planner.problem import ModelSizes
from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.quantization.at_load import PLAIN, QUANTIZER, TRANSPOSED, Quantization, own_format
from swarm.stage.quantization.version import DECODERS
from swarm.wire.messages import LayerRange
from tests.files_of_models import TINY_CONFIG, as_file

HIDDEN, WORDS = 128, 256
LAYER = {
    "model.layers.0.self_attn.q_proj.weight": (128, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (192, HIDDEN),
    "model.layers.0.mlp.gate.weight": (64, HIDDEN),  # the router
    "model.layers.0.self_attn.kv_b_proj.weight": (256, HIDDEN),  # heads of latents
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.bias": (128,),
    "model.layers.0.self_attn.small.weight": (8, HIDDEN),
}
TABLES = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
MATRICES = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"}


def write_model(
    folder: Path, tensors: Mapping[str, tuple[int, ...]], floats8: Collection[str] = (), **config: object
) -> Path:
    """A folder with these tensors, all zeros: in bfloat16, and some in FP8."""
    header: dict[str, object] = {}
    at = 0
    for name, shape in tensors.items():
        dtype = "F8_E4M3" if name in floats8 else "BF16"
        stop = at + (1 if name in floats8 else 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    (folder / "model.safetensors").write_bytes(as_file(header, at))
    sizes = {"num_hidden_layers": 1, "vocab_size": WORDS, "hidden_size": HIDDEN, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | sizes | config))
    return folder


def opened(folder: Path, quantization: Quantization, **config: object) -> Checkpoint:
    return Checkpoint(write_model(folder, LAYER | TABLES, **config), quantization=quantization)


def widths(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: weight.format.name for name, weight in checkpoint.quantized.items()}


@pytest.mark.parametrize("weights", ["auto", "dense"])
def test_a_plain_checkpoint_stays_plain(tmp_path: Path, weights: str) -> None:
    checkpoint = opened(tmp_path, Quantization(weights))
    assert checkpoint.quantized == {}
    assert checkpoint.tensors.keys() == (LAYER | TABLES).keys()
    assert checkpoint.manifest("bfloat16").weights == ""


def test_matrices_are_quantized_and_the_rest_is_not(tmp_path: Path) -> None:
    """Routers, heads of latents, norms and biases stay as they are, and matrices that would not become smaller."""
    checkpoint = opened(tmp_path, Quantization("int8"))
    assert widths(checkpoint) == dict.fromkeys(MATRICES | TABLES.keys(), "int8")
    assert checkpoint.tensors.keys() == (LAYER | TABLES).keys() - checkpoint.quantized.keys()


def test_int4_has_a_head_of_six_bits(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, Quantization("int4"))
    assert widths(checkpoint) == dict.fromkeys([*MATRICES, "model.embed_tokens.weight"], "int4") | {
        "lm_head.weight": "int6"
    }


def test_a_table_that_is_also_the_head_has_the_head_s_setting(tmp_path: Path) -> None:
    tensors = LAYER | {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    folder = write_model(tmp_path, tensors, tie_word_embeddings=True)
    assert widths(Checkpoint(folder, quantization=Quantization("int4")))["model.embed_tokens.weight"] == "int6"


def test_a_quantized_table_that_is_also_the_head_counts_once_on_a_stage_with_both_ends(tmp_path: Path) -> None:
    """Stages with one of the two ends need it once each. A plain one is loaded twice even by a stage with both."""
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    layers = LAYER | {name.replace(".0.", ".1."): shape for name, shape in LAYER.items()}
    folder = write_model(tmp_path, layers | {"model.embed_tokens.weight": (WORDS, HIDDEN)}, **sizes)
    table = WORDS * HIDDEN * 6.5 / 8
    for quantization, held, num_tables in ((Quantization("int4"), table, 1), (Quantization(), 2 * WORDS * HIDDEN, 2)):
        manifest = Checkpoint(folder, quantization=quantization).manifest("bfloat16")
        first, last = manifest.layer_bytes
        assert (manifest.embed_bytes, manifest.head_bytes) == (held, held)
        for sizes_of in (manifest, ModelSizes.from_manifest(manifest)):
            assert sizes_of.weight_bytes(LayerRange(0, 1)) == first + held
            assert sizes_of.weight_bytes(LayerRange(1, 2)) == last + held
            assert sizes_of.weight_bytes(LayerRange(0, 2)) == first + last + num_tables * held


def test_a_sampled_file_that_is_written_again_is_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest may miss the change. The manifest's is compared with other machines', so it has no times."""

    def keys() -> tuple[str, str]:
        checkpoint = Checkpoint(tmp_path, quantization=Quantization("int4"))
        weight = checkpoint.quantized["lm_head.weight"]
        return checkpoint.digest_files(weight), checkpoint.manifest("bfloat16").files[-1].digest

    opened(tmp_path, Quantization("int4"))
    path = tmp_path / "model.safetensors"
    os.utime(path, ns=(1, 1))
    whole = keys()
    monkeypatch.setattr("swarm.stage.model.identity.MAX_WHOLE_BYTES", 1000)
    sampled = keys()
    os.utime(path, ns=(2, 2))
    again = keys()
    assert whole[0] == whole[1]
    assert sampled[0] != again[0]
    assert sampled[1] == again[1]


def test_gate_and_up_of_unlike_formats_count_dense(tmp_path: Path) -> None:
    """They are multiplied in one pass, and what can't be packed together is dequantized."""
    layer = LAYER | {"model.layers.0.mlp.up_proj.weight": (192, HIDDEN)}
    checkpoint = Checkpoint(write_model(tmp_path, layer | TABLES), quantization=Quantization("int4"))
    packed = checkpoint.manifest("bfloat16").layer_bytes[0]
    up = checkpoint.quantized["model.layers.0.mlp.up_proj.weight"]
    checkpoint.quantized[up.name] = replace(up, format=own_format("int8", 32))
    both = 2 * 192 * HIDDEN
    assert checkpoint.manifest("bfloat16").layer_bytes[0] == packed + both * (2 - 4.5 / 8)


def test_heads_of_latents_count_dense(tmp_path: Path) -> None:
    """They multiply by rows and by columns; a kernel reads a quantized matrix by rows only."""
    plain, name = opened(tmp_path, Quantization()).manifest("bfloat16"), "model.layers.0.self_attn.kv_b_proj.weight"
    tensors = LAYER | TABLES | {f"{name}_scale": (1,)}
    folder = write_model(tmp_path, tensors, [name], quantization_config={"quant_method": "fp8"})
    checkpoint = Checkpoint(folder)
    assert widths(checkpoint) == {name: "FP8"}
    assert checkpoint.manifest("bfloat16").layer_bytes == plain.layer_bytes


EXPERTS = {
    f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": (128, HIDDEN)
    for expert in range(3)
    for part in ("gate", "up", "down")
}


@pytest.mark.parametrize("reason", ["another format", "a plain one", "orders of inputs"])
@pytest.mark.parametrize(("part", "num_unpacked"), [("up", 6), ("down", 3)])
def test_experts_that_do_not_stay_quantized_count_dense(
    tmp_path: Path, reason: str, part: str, num_unpacked: int
) -> None:
    """Gate and up of all experts of a layer are one tensor of the model, and their down projections are another."""
    checkpoint = Checkpoint(write_model(tmp_path, LAYER | EXPERTS | TABLES), quantization=Quantization("int4"))
    packed = checkpoint.manifest("bfloat16").layer_bytes[0]
    weight = checkpoint.quantized[f"model.layers.0.mlp.experts.1.{part}_proj.weight"]
    if reason == "a plain one":
        del checkpoint.quantized[weight.name]
        checkpoint.tensors[weight.name] = weight.parts["weight"]
    else:
        other = {"format": own_format("int8", 32)} if reason == "another format" else {"is_reordered": True}
        checkpoint.quantized[weight.name] = replace(weight, **other)
    unpacked = checkpoint.manifest("bfloat16").layer_bytes[0]
    assert unpacked == packed + num_unpacked * 128 * HIDDEN * (2 - 4.5 / 8)


def test_the_ends_have_settings_of_their_own(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, Quantization("int4", embedding="dense", head="int8"))
    assert widths(checkpoint) == dict.fromkeys(MATRICES, "int4") | {"lm_head.weight": "int8"}
    only_head = opened(tmp_path, Quantization(head="int8"))
    assert widths(only_head) == {"lm_head.weight": "int8"}


def test_tables_beside_a_quantized_head_have_their_own_settings(tmp_path: Path) -> None:
    """A head that is quantized in the files is one all the same: the embedding is not tied to it."""
    tensors = LAYER | TABLES | {"lm_head.weight_scale": (1,)}
    folder = write_model(tmp_path, tensors, ["lm_head.weight"], quantization_config={"quant_method": "fp8"})
    assert widths(Checkpoint(folder)) == {"lm_head.weight": "FP8"}
    embedding = Checkpoint(folder, quantization=Quantization(embedding="int8"))
    assert widths(embedding) == {"lm_head.weight": "FP8", "model.embed_tokens.weight": "int8"}
    assert widths(Checkpoint(folder, quantization=Quantization(head="int8"))) == {"lm_head.weight": "FP8"}


def test_sizes_are_those_of_the_packed_matrices(tmp_path: Path) -> None:
    """4.5 bits in groups of 32, 4.125 in groups of 128; int6 with 6.5, int8 with 8.5."""
    plain_bytes = 2 * (64 * HIDDEN + 256 * HIDDEN + HIDDEN + 128 + 8 * HIDDEN)
    for group, bits in ((32, 4.5), (128, 4.125)):
        manifest = opened(tmp_path, Quantization("int4", group)).manifest("bfloat16")
        assert manifest.layer_bytes == ((128 + 192) * HIDDEN * bits / 8 + plain_bytes,)
        assert manifest.embed_bytes == WORDS * HIDDEN * bits / 8
        assert manifest.head_bytes == WORDS * HIDDEN * (bits + 2) / 8
    manifest = opened(tmp_path, Quantization("int8")).manifest("bfloat16")
    assert (manifest.embed_bytes, manifest.head_bytes) == (WORDS * HIDDEN * 8.5 / 8,) * 2


def test_experts_are_quantized_along_their_inputs(tmp_path: Path) -> None:
    """gpt-oss stores them transposed."""
    experts = {"model.layers.0.mlp.experts.gate_up_proj": (4, 128, 192)}
    folder = write_model(tmp_path, experts | TABLES, model_type="gpt_oss")
    for model_type, expected in (("gpt_oss", ((4, 192, 128), TRANSPOSED)), ("qwen3_moe", ((4, 128, 192), PLAIN))):
        folder = write_model(tmp_path, experts | TABLES, model_type=model_type)
        weight = Checkpoint(folder, quantization=Quantization("int4")).quantized[next(iter(experts))]
        assert (weight.shape, weight.encoding) == expected


def test_a_family_without_such_matrices_is_refused(tmp_path: Path) -> None:
    """Its layers hold their matrices transposed."""
    with pytest.raises(
        ModelError, match="the layers of a gpt2 model can't be quantized at load; start without --weights"
    ):
        opened(tmp_path, Quantization("int8"), model_type="gpt2")


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    stored = opened(tmp_path, Quantization("int8")).quantized.values()
    with pytest.raises(ModelError, match=r"quantized already \(int8\), .* leave worker\.weights at auto"):
        Quantization("int4").check_stored(stored, "llama")
    Quantization("dense").check_stored(stored, "llama")
    Quantization().check_stored(stored, "llama")


def test_the_manifest_describes_all_that_changes_numbers(tmp_path: Path) -> None:
    def describe(quantization: Quantization) -> str:
        return opened(tmp_path, quantization).manifest("bfloat16").weights

    assert describe(Quantization("int8")) == f"int8, groups of 32, quantizer {QUANTIZER}"
    assert describe(Quantization("int4")) == f"int4, head int6, groups of 32, quantizer {QUANTIZER}"
    assert describe(Quantization("int4", 128, "int8", "dense")) == (
        f"int4, embedding int8, head dense, groups of 128, quantizer {QUANTIZER}"
    )
    assert describe(Quantization(head="int8")) == f"head int8, groups of 32, quantizer {QUANTIZER}"
    stored = opened(tmp_path, Quantization("int8")).quantized.values()
    assert Quantization().describe(stored, ()) == f"int8, decoder {DECODERS}"
    assert Quantization("dense").describe(stored, ()) == f"dense, decoder {DECODERS}"


def test_the_manifest_has_the_activations(tmp_path: Path) -> None:
    """Only where some are rounded: a plain or unpacked model computes the same with both settings."""

    def activations(quantization: Quantization) -> str:
        return opened(tmp_path, quantization).manifest("bfloat16").activations

    assert activations(Quantization("int4")) == ""
    assert activations(Quantization("int4", activations="int8")) == "int8"
    assert activations(Quantization(head="int8", activations="int8")) == "int8"
    assert activations(Quantization(activations="int8")) == ""
    tensors = LAYER | TABLES | {"lm_head.weight_scale": (1,)}
    folder = write_model(tmp_path, tensors, ["lm_head.weight"], quantization_config={"quant_method": "fp8"})
    for weights in ("auto", "dense"):
        checkpoint = Checkpoint(folder, quantization=Quantization(weights, activations="int8"))
        assert checkpoint.manifest("bfloat16").activations == ""


def test_files_are_the_same_whatever_is_quantized(tmp_path: Path) -> None:
    """They identify the model, and are fetched for the parts of quantized matrices, too."""
    plain, quantized = opened(tmp_path, Quantization()), opened(tmp_path, Quantization("int4"))
    assert plain.manifest("bfloat16").files == quantized.manifest("bfloat16").files
    assert plain.num_bytes == quantized.num_bytes
    assert plain.stored_dtype == quantized.stored_dtype == "bfloat16"
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is missing"):
        quantized.missing(["lm_head.weight"])


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_a_worker_without_kernels_knows_what_dequantized_weights_take(tmp_path: Path, weights: str) -> None:
    """It holds fewer layers than the manifest's sizes suggest."""

    def total(quantization: Quantization) -> int:
        manifest = opened(tmp_path, quantization).manifest("float32")
        return sum(manifest.layer_bytes) + manifest.embed_bytes + manifest.head_bytes

    share = opened(tmp_path, Quantization(weights)).packed_share("float32")
    assert share == pytest.approx(total(Quantization(weights)) / total(Quantization()))
    assert (share == 1) == (weights == "auto")
