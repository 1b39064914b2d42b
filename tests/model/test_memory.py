"""A worker's resident memory is its share of the model, and a bounded overhead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from swarm.stage import native
from tests.model.models import llama_config

# While loading: one matrix as read beside its packed copy, what the allocator keeps, and the kernels' own code and
# buffers at the first run. Measured: 8 MiB on top of the share when loaded and 19 at most, of a model of 200 MB.
OVERHEAD_BYTES = 48 << 20
# Measured: 17 MiB on top of a share of 27 MiB, and 21 after a run; unpacked, the share would take 94.
QUANTIZED_OVERHEAD_BYTES = 32 << 20
# Keys and values of 512 positions are committed as they are written, not when they are reserved.
RESERVED_POSITIONS = 100_000

_CHILD = """
import json, pathlib, sys
from swarm.stage.shell.openmp import use_passive_waiting
use_passive_waiting()
import numpy as np, psutil
from swarm.stage.executor import Batch
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.quantization.at_load import Quantization
from swarm.wire.messages import LayerRange, Row

def resident(): return psutil.Process().memory_info().rss
def status(name): return int(pathlib.Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024
def forget_peak(): pathlib.Path("/proc/self/clear_refs").write_text("5")
forget_peak()
start = resident()
quantization = Quantization(sys.argv[3])
executor = TorchExecutor(sys.argv[1], dtype="bfloat16", threads=2, quantization=quantization)
made = status("VmHWM") - start
forget_peak()
executor.measure()
measuring = status("VmHWM") - start
forget_peak()
before = resident()
layers = LayerRange(4, 8)
executor.prepare(layers, (), 8, lambda *_: None)
executor.activate(layers)
loaded, loading = resident(), status("VmHWM")
executor.open(1, int(sys.argv[2]))
opened = resident()
hidden = np.zeros((256, 1024), np.float32)
for start in (0, 256):
    batch = Batch((Row(1, start, 256, False),), np.zeros(256, np.int64), hidden, ())
    executor.forward(batch, lambda: False, lambda: None)
used = resident()
executor.release(1)
manifest = executor.manifest
print(json.dumps({"made": made, "measuring": measuring, "before": before, "loaded": loaded, "loading": loading,
    "opened": opened, "used": used, "released": resident(), "share": executor.weight_bytes,
    "whole": sum(manifest.layer_bytes) + manifest.embed_bytes + manifest.head_bytes,
    "kv": sum(manifest.kv_bytes_per_token[4:8]) * 512}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    config = llama_config(
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=2000,
        max_position_embeddings=RESERVED_POSITIONS,
    )
    model = LlamaForCausalLM(config).bfloat16()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    save_file(dict(model.state_dict()), path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, int]:
    return measure(folder, "auto")


def measure(folder: Path, weights: str) -> dict[str, int]:
    """Load and use half of the model in a process of its own, with this setting of ``worker.weights``."""
    command = [sys.executable, "-c", _CHILD, str(folder), str(RESERVED_POSITIONS), weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=_root())
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    print({name: f"{value / 2**20:.1f} MiB" for name, value in result.items()})
    return result


def _root() -> Path:
    return Path(__file__).parents[2]


def test_half_a_model(measured: dict[str, int]) -> None:
    """Half of a 200 MB model takes half of it and a bounded overhead, at the end and at any time while it loads."""
    assert measured["whole"] > 180 << 20
    assert measured["share"] < 0.55 * measured["whole"]
    assert measured["loaded"] - measured["before"] < measured["share"] + OVERHEAD_BYTES
    assert measured["loading"] - measured["before"] < measured["share"] + OVERHEAD_BYTES
    assert measured["loaded"] - measured["before"] > measured["share"] // 2  # the figures are about this at all


def test_room_is_committed_when_it_is_written(measured: dict[str, int]) -> None:
    """Reserving a long context costs nothing yet, using a part of it costs that part, release gives it back."""
    assert measured["opened"] - measured["loaded"] < 1 << 20
    assert measured["used"] - measured["opened"] > measured["kv"]
    assert measured["used"] - measured["released"] > 0.9 * measured["kv"]


@pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")
def test_a_share_of_int4_takes_less_than_a_third_of_bfloat16(folder: Path, measured: dict[str, int]) -> None:
    """By the plan, and as resident memory of a process: what is read to be quantized does not stay."""
    int4 = measure(folder, "int4")
    assert int4["share"] <= 0.30 * measured["share"]
    assert int4["loaded"] - int4["before"] < int4["share"] + QUANTIZED_OVERHEAD_BYTES
    assert int4["used"] - int4["before"] < int4["share"] + int4["kv"] + QUANTIZED_OVERHEAD_BYTES
    assert int4["loading"] - int4["before"] < int4["share"] + OVERHEAD_BYTES
