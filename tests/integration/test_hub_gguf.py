"""GGUF models on a hub, with real workers: which parts of the files each fetches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from swarm import AsyncClient
from swarm.errors import ModelError
from tests.faults.zygote import Zygote
from tests.integration.hub_processes import Up, Worker
from tests.integration.processes import START_S, Processes
from tests.model.gguf_files import write_model
from tests.model.models import llama_config, random_model
from tests.standin_hub import NAME, Hub, standin

NUM_LAYERS = 8
FILE = "tiny-Q8_0.gguf"
QUANTIZATION = f"{NAME}:Q8_0"
PROMPT = [3, 141, 59, 26, 5]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of random weights, of about 0.6 MB each; embedding and head are small."""
    path = tmp_path_factory.mktemp("hub-gguf") / FILE
    config = llama_config(num_hidden_layers=NUM_LAYERS, hidden_size=256, intermediate_size=640, head_dim=64)
    write_model(path, random_model(config), Type.Q8_0)
    return path


@pytest.fixture
def hub(file: Path) -> Iterator[Hub]:
    with standin({FILE: file.read_bytes(), "tiny-Q4_0.gguf": b"another"}) as served:
        yield served


def test_each_worker_fetches_the_parts_with_its_layers(hub: Hub, tmp_path: Path) -> None:
    """Half of the layers are about half of the file. A later plan fetches what is missing then, and once everything is
    there, the file is the hub's own."""
    size, half = len(hub.files[FILE]), NUM_LAYERS // 2
    one, two = Worker(hub, tmp_path / "one", QUANTIZATION), Worker(hub, tmp_path / "two", QUANTIZATION)
    _, told = one.prepare(0, half)
    assert 0.4 * size < hub.bytes_of(FILE) < 0.7 * size
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    hub.asked.clear()
    two.prepare(half, NUM_LAYERS)
    assert 0.4 * size < hub.bytes_of(FILE) < 0.7 * size

    # Layers move. Until their parts can be fetched, nothing changes.
    hub.refusal = (503, "")
    with pytest.raises(ModelError, match=r"can't provide somebody/tiny@.* now: it answers 503; try again later"):
        one.prepare(0, half + 2)
    hub.refusal = None
    hub.asked.clear()
    one.prepare(0, half + 2)
    assert 0.15 * size < hub.bytes_of(FILE) < 0.35 * size
    one.prepare(0, NUM_LAYERS)
    assert hub.fetched() == []
    (whole,) = (tmp_path / "one").rglob(f"snapshots/*/{FILE}")
    assert whole.read_bytes() == hub.files[FILE]
    one.end()
    two.end()


async def tokens_of(client: AsyncClient) -> list[int]:
    done = await client.generate(PROMPT, max_tokens=12, ignore_eos=True)
    return list(done.tokens)


@pytest.fixture
def local(file: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Processes]:
    """A broker and workers on the local file."""
    logs = tmp_path / "local"
    logs.mkdir()
    with Processes(file, logs, launch=zygote) as processes:
        yield processes


async def test_up_with_a_gguf_model_on_a_hub(hub: Hub, local: Processes, tmp_path: Path) -> None:
    """``swarm up --model owner/name:Q8_0`` gives the tokens of the local file. Two workers that share a cache fetch
    each byte once; one with the local file joins them."""
    local.start(1)
    async with AsyncClient(local.url, connect_timeout_s=START_S) as client:
        await local.until_serving(client, 1)
        expected = await tokens_of(client)
    local.stop()
    with Up(hub, tmp_path, QUANTIZATION) as up:
        local.url = up.url
        async with AsyncClient(up.url, connect_timeout_s=START_S) as client:
            await local.until_serving(client, 2)
            assert await tokens_of(client) == expected
            assert hub.bytes_of(FILE) <= len(hub.files[FILE])
            assert hub.fetched() == []
            shares = [up.fetched_by(worker, {FILE}) for worker in ("w0", "w1")]
            assert shares == [{FILE}, {FILE}]

            hub.refusal = (500, "")
            local.start_worker("elsewhere")
            await local.until(client, "nodes", lambda found: len(found["workers"]) == 3)
            local.stop()
