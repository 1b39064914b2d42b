"""Times on the device's own clock, and its memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swarm.errors import ModelError
from swarm.params import SamplingParams
from swarm.stage.engine import gpu_load
from swarm.stage.engine.device import (
    CudaClock,
    enter_device,
    limit_memory,
    make_clock,
    memory_stats,
    parse_device,
    resolve_device,
)
from swarm.stage.engine.forward import copy_to_array
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, ForwardResult, SampleJob
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import MANY, never, nothing, ready


class CountingClock:
    """Every moment is one second after the one before."""

    def __init__(self) -> None:
        self.num_marks = 0

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def elapsed_s(self, first: Any, last: Any) -> float:
        return float(last - first)


def forward(executor: TorchExecutor, *, sample: bool) -> ForwardResult:
    """Three tokens of a sequence; the last stage draws one."""
    executor.open(1, 64)
    first = executor._active_stage().has_embedding
    hidden = None if first else np.ones((3, executor.manifest.hidden_size), np.float32)
    job = SampleJob(0, SamplingParams(), 1, [5, 6, 7], 3)
    batch = Batch((Row(1, 0, 3, sample),), np.array([5, 6, 7]), hidden, (job,) if sample else ())
    return executor.forward(batch, never, nothing)


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless bits must be portable; a device that was named stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_device("auto", bits) for bits in ("auto", "fast", "portable")] == ["cuda", "cuda", "cpu"]
    assert resolve_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"


def test_a_gpu_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two names of one GPU are the same device for the planner; and one that is not there is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(parse_device(name)) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ModelError, match="device cuda:2 was requested, but this machine has cuda:0 to cuda:1"):
        parse_device("cuda:2")


def test_threads_enter_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a limit is of the memory of the whole device."""
    entered, limits = [], []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append((share, device))
    )
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    for device in (gpu, cpu):
        enter_device(device)
        limit_memory(device, 20 << 30)
    assert entered == [gpu]
    assert limits == [(0.25, gpu)]


def test_what_is_timed(llama: Path) -> None:
    """Moments are taken before the layers, after them, after the head, after the copy to the host and after the
    sampling; each part is between two of them."""
    whole, early, last = (ready(llama, LayerRange(*layers)) for layers in ((0, 8), (0, 4), (4, 8)))
    for executor in (whole, early, last):
        executor._clock = CountingClock()
    for executor in (whole, last):
        done = forward(executor, sample=True)
        assert (done.compute_s, done.head_s, done.copy_s, done.sample_s) == (3.0, 1.0, 0.0, 1.0)
    done = forward(early, sample=False)
    assert (done.compute_s, done.head_s, done.copy_s, done.sample_s) == (3.0, 0.0, 1.0, 1.0)


def test_statistics_have_memory_and_times(llama: Path) -> None:
    """On the CPU: the process's memory, and what was sampled took some of the time."""
    executor = ready(llama, LayerRange(0, 8))
    done = forward(executor, sample=True)
    assert done.compute_s > done.head_s > 0
    stats = executor.stats()
    assert stats["sample_s"] == done.sample_s > 0
    assert 0 < stats["device_memory_bytes"] < stats["device_memory_total_bytes"]


@pytest.mark.gpu
def test_a_gpu_is_timed_by_itself(llama: Path) -> None:
    """Its clock counts what it computes, also while the host is elsewhere; its memory is its own."""
    executor = TorchExecutor(str(llama), device="cuda", dtype="float32", memory_limit=MANY)
    executor.prepare(LayerRange(0, 8), (), 8, nothing)
    executor.activate(LayerRange(0, 8))
    device = torch.device("cuda")
    clock = make_clock(device)
    assert isinstance(clock, CudaClock)
    matrix = torch.ones(4096, 4096, device=device)
    began = clock.mark()
    for _ in range(20):
        matrix = matrix @ matrix
    assert clock.elapsed_s(began, clock.mark()) > 0.001  # 20 times 137 billion operations
    done = forward(executor, sample=True)
    assert done.compute_s > done.head_s > 0
    assert done.sample_s > 0
    memory = memory_stats(device)
    assert 0 < memory["device_memory_bytes"] <= memory["device_memory_peak_bytes"] < memory["device_memory_total_bytes"]


def test_utilisation_is_the_drivers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the time; left out without the driver's package, and where the driver does not answer."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(gpu_load, "pynvml", None)
    assert gpu_load.gpu_utilization(device) == {}
    monkeypatch.setattr(gpu_load, "pynvml", SimpleNamespace(NVMLError=KeyError))
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 75)
    assert gpu_load.gpu_utilization(device) == {"device_utilization": 0.75}

    def fail(_: torch.device) -> int:
        raise KeyError("not supported")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert gpu_load.gpu_utilization(device) == {}


@pytest.mark.gpu
def test_hidden_states_leave_a_gpu_unchanged() -> None:
    """Whatever their layout; the array has memory of its own."""
    hidden = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    for part in (hidden, hidden.T, hidden[::2]):
        array = copy_to_array(part)
        assert array.flags.owndata
        assert np.array_equal(array, part.float().cpu().numpy())
