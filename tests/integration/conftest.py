"""Fixtures for tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.faults.zygote import Zygote
from tests.integration.gateway import Served


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Fork for ``Processes(…, launch=zygote)``: starts take a tenth of a second. Not for those whose memory matters."""
    with Zygote(tmp_path_factory.mktemp("random-llama")) as zygote:
        yield zygote


@pytest.fixture(scope="session")
def random_llama(zygote: Zygote) -> Path:
    """Eight layers of random weights, saved as a model's folder. No tokenizer."""
    return zygote.model


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the files that clients fetch apart, for each test."""
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))


@pytest.fixture(scope="session")
def served(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two workers with the embedded model, and a gateway: one for all tests that ask over HTTP and harm nobody."""
    with Served(tmp_path_factory.mktemp("served"), zygote) as served:
        yield served
