"""Tables of rotary positions, made by a rule of our own: torch's but for last bits, and the same everywhere."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from swarm.errors import ModelError
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.stage.model import portable_math as byrule
from swarm.stage.model.portable_math import portable_math
from swarm.stage.model.rope import RopeTable
from swarm.wire.messages import LayerRange

POSITIONS = 5000
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10_000.0, "rope_type": "default"},
    "large base": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "linear": {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {
        "rope_theta": 150_000.0,
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 1024,
    },
    "proportional": {"rope_theta": 1_000_000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
}
# xxh3 of the bytes of cosines and sines in float32. They are the rule: other numbers are other tables, and a swarm of
# workers with one and the other would compute different bits without anybody knowing.
FINGERPRINTS = {
    "default": "cee5208438405c8d",
    "large base": "cde05afd60068cae",
    "linear": "2e89317b7355dc5c",
    "llama3": "e922c7f9af47dc19",
    "yarn": "5c974a4e712ca72c",
    "proportional": "acfb8f36aea17ba9",
}


def config_of(kind: str) -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=512, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32_768
    )
    config.rope_parameters = SCALED[kind]
    return config


def rotary(kind: str) -> Any:
    """The model's own module, its frequencies computed in whatever mode is on."""
    return LlamaRotaryEmbedding(config_of(kind))


def tables(module: Any, length: int = POSITIONS) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = module(torch.empty(0), torch.arange(length).unsqueeze(0))
    return cosines[0], sines[0]


def by_the_rule(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    with portable_math():
        return tables(rotary(kind))


@pytest.mark.parametrize("kind", SCALED)
def test_as_torch_computes_them(kind: str) -> None:
    """Frequencies differ by no more than a last bit, and so do the cosines and sines of the same angles."""
    with portable_math():
        ours = rotary(kind)
    theirs = rotary(kind)
    assert ours.attention_scaling == theirs.attention_scaling
    assert ours.inv_freq.shape == theirs.inv_freq.shape
    steps = ours.inv_freq.view(torch.int32) - theirs.inv_freq.view(torch.int32)
    assert int(steps.abs().max()) <= 1
    with portable_math():
        found = tables(ours)
    for mine, other in zip(found, tables(ours), strict=True):
        ulp = torch.from_numpy(np.spacing(other.abs().numpy()))
        assert float(((mine - other).abs() / ulp).max()) <= 2
        assert float((mine - other).abs().max()) <= 2**-23 * ours.attention_scaling


def digest_of(parts: tuple[torch.Tensor, ...]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kind", SCALED)
def test_the_tables_are_the_same_everywhere(kind: str) -> None:
    """To the bit, on any processor and with any version of torch."""
    assert digest_of(by_the_rule(kind)) == FINGERPRINTS[kind]


def test_with_the_instructions_of_an_older_processor() -> None:
    """torch and numpy are told to do without what this processor has: the tables are the same."""
    code = (
        "import json; from tests.model import test_rope as t\n"
        "print(json.dumps({kind: t.digest_of(t.by_the_rule(kind)) for kind in t.SCALED}))"
    )
    older = {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | older,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == FINGERPRINTS


def test_waves_are_right() -> None:
    """Cosine and sine of float32 angles, small and large, near the crossings of zero too: what the C library says,
    rounded to float32."""
    chance = np.random.default_rng(3)
    quarters = np.arange(1, 20_000) * (math.pi / 2)
    angles = np.concatenate(
        [chance.uniform(-10, 10, 50_000), chance.uniform(-1e6, 1e6, 50_000), quarters, [0.0, 1e-30]]
    )
    angles = angles.astype(np.float32).astype(np.float64)
    for ours, right in ((byrule.sine, math.sin), (byrule.cosine, math.cos)):
        expected = np.array([right(each) for each in angles]).astype(np.float32)
        found = ours(angles).astype(np.float32)
        assert int(np.abs(found.view(np.int32) - expected.view(np.int32)).max()) <= 1
        assert float((found != expected).mean()) < 1e-5
    with pytest.raises(ModelError, match="angles beyond"):
        byrule.sine(np.array([1e9]))
    with pytest.raises(ModelError, match="angles beyond"):
        byrule.cosine(np.array([float("nan")]))


def test_powers_and_their_like() -> None:
    """By decimal numbers: the nearest float64, however they are written in a model's code."""
    x = torch.tensor([0.25, 0.5, 1.75], dtype=torch.float64)
    right = {"pow": [math.pow(1e6, v) for v in x], "exp": [math.exp(v) for v in x], "log": [math.log(v) for v in x]}
    with portable_math():
        found = {"pow": [1e6**x, torch.pow(1e6, x)], "exp": [x.exp(), torch.exp(x)], "log": [x.log(), torch.log(x)]}
        square, negative, whole = x**2, (-x) ** 2.0, torch.tensor([2, 3]) ** 2
        turned = torch.polar(torch.ones(3, dtype=torch.float64), x)
    for name, all_ways in found.items():
        for each in all_ways:
            assert each.tolist() == pytest.approx(right[name], rel=3e-16), name
    assert square.tolist() == (x * x).tolist() == negative.tolist()
    assert whole.tolist() == [4, 9]
    assert turned.real.tolist() == byrule.cosine(x.numpy()).tolist()
    assert turned.imag.tolist() == byrule.sine(x.numpy()).tolist()


def test_a_table_grows_at_its_end() -> None:
    """More positions come behind those that it has; all are the rule's."""
    table = RopeTable(rotary("llama3"))
    expected = None
    for length in (10, 1500, 5000):
        this = ForwardPass(KvArena(torch.device("cpu")), LayerRange(0, 1), ())
        this.length = length
        positions = torch.tensor([[0, 7, length - 1]])
        with use_pass(this):
            found = table(torch.empty(0), positions)
        with portable_math():
            expected = tables(table.inner, length)
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine[0], right[positions[0]])
