"""Small random models on disk, made when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.stage import native
from tests.model.cutting import Cutter
from tests.model.models import llama_config, random_model

Save = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for which the process gave up its own kernels is not the next test's."""
    monkeypatch.setattr(native, "_refusals", [])


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Save a random model of a configuration and name its folder."""

    def saved(config: Any, *, shard: str = "1GB", dtype: torch.dtype = torch.float32) -> Path:
        folder = tmp_path_factory.mktemp("model")
        random_model(config, dtype).save_pretrained(folder, max_shard_size=shard)
        return folder

    return saved


@pytest.fixture(scope="session")
def llama(save: Save) -> Path:
    """Eight layers, grouped queries, untied, one file."""
    return save(llama_config())


@pytest.fixture(scope="session")
def cutter() -> Iterator[Cutter]:
    """Pipelines over executors that tests share; every pipeline starts empty."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Cutter()
    torch.set_num_threads(threads)
