"""Models on a hub, with real workers: who fetches what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm import AsyncClient
from swarm.errors import ModelError
from tests.faults.zygote import Zygote
from tests.integration.hub_processes import ROOT, Up, Worker, variables
from tests.integration.processes import START_S, Processes
from tests.model.models import llama_config, random_model
from tests.standin_hub import NAME, Hub, standin

NUM_LAYERS = 8
PROMPT = [3, 141, 59, 26, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of random weights in shards of about a layer and a half."""
    folder = tmp_path_factory.mktemp("hub-model") / "a-copy"
    random_model(llama_config(num_hidden_layers=NUM_LAYERS)).save_pretrained(folder, max_shard_size="300KB")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with standin({path.name: path.read_bytes() for path in folder.iterdir()}) as served:
        yield served


def shards_of(folder: Path, *layers: int, ends: tuple[str, ...] = ()) -> list[str]:
    """The files that the index names for these layers and for the tensors of ``ends``."""
    homes = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    starts = (*(f"model.layers.{layer}." for layer in layers), *ends)
    return sorted({home for name, home in homes.items() if name.startswith(starts)})


EMBEDDING = ("model.embed_tokens.",)
HEAD = ("model.norm.", "lm_head.")


def test_each_worker_fetches_the_files_of_its_layers(folder: Path, hub: Hub, tmp_path: Path) -> None:
    """Two workers with a cache each, half of the layers each: each has its files and no others, and the hub was asked
    for no more. Fetching is told as progress, of bytes that come and bytes that are read. A later plan fetches what is
    missing then."""
    half = NUM_LAYERS // 2
    lower = shards_of(folder, *range(half), ends=EMBEDDING)
    upper = shards_of(folder, *range(half, NUM_LAYERS), ends=HEAD)
    everything = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(everything) >= 4
    assert set(lower) < set(everything) > set(upper)

    one, two = Worker(hub, tmp_path / "one"), Worker(hub, tmp_path / "two")
    files, told = one.prepare(0, half)
    assert files == hub.fetched_weights() == lower
    to_fetch = sum((folder / name).stat().st_size for name in lower)
    assert [to_fetch, told[-1][1]] in told
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > to_fetch
    hub.asked.clear()
    assert two.prepare(half, NUM_LAYERS)[0] == hub.fetched_weights() == upper

    # Layers move: those that stay loaded need no file, the others' files come. Until they can, nothing changes.
    hub.refusal = (503, "")
    with pytest.raises(ModelError, match=r"can't provide somebody/tiny@.* now: it answers 503; try again later"):
        one.prepare(0, half + 2)
    hub.refusal = None
    hub.asked.clear()
    assert one.prepare(0, half + 2)[0] == shards_of(folder, *range(half + 2), ends=EMBEDDING)
    missing = set(shards_of(folder, half, half + 1)) - set(lower)
    assert set(hub.fetched_weights()) == missing != set()
    one.end()
    two.end()


def test_a_tied_head_needs_the_embeddings_file(tmp_path: Path) -> None:
    """Its weights are stored once, with the embedding."""
    folder = tmp_path / "tied"
    config = llama_config(num_hidden_layers=NUM_LAYERS, tie_word_embeddings=True)
    random_model(config).save_pretrained(folder, max_shard_size="300KB")
    with standin({path.name: path.read_bytes() for path in folder.iterdir()}) as hub:
        worker = Worker(hub, tmp_path / "cache")
        last = NUM_LAYERS - 1
        files, _ = worker.prepare(last, NUM_LAYERS)
        worker.end()
    assert files == shards_of(folder, last, ends=(*EMBEDDING, *HEAD))
    assert "model-00001" in files[0]


async def tokens_of(client: AsyncClient) -> list[int]:
    done = await client.generate(PROMPT, max_tokens=12, ignore_eos=True)
    return list(done.tokens)


@pytest.fixture
def local(folder: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Processes]:
    """Workers on the local folder, and a broker if it is asked for."""
    logs = tmp_path / "local"
    logs.mkdir()
    with Processes(folder, logs, launch=zygote) as processes:
        yield processes


@pytest.fixture
async def expected(local: Processes) -> list[int]:
    """The tokens of the local folder."""
    local.start(1)
    async with AsyncClient(local.url, connect_timeout_s=START_S) as client:
        await local.until_serving(client, 1)
        tokens = await tokens_of(client)
    local.stop()
    return tokens


async def test_up_with_a_model_on_a_hub(hub: Hub, expected: list[int], local: Processes, tmp_path: Path) -> None:
    """``swarm up --model owner/name`` gives the tokens of the local folder. Every file of weights is fetched once, into
    the cache that both workers share: some by the one, some by the other, and by neither all. A worker with a copy of
    the folder, without the hub, joins them."""
    everything = {name for name in hub.files if name.endswith(".safetensors")}
    with Up(hub, tmp_path) as up:
        local.url = up.url
        async with AsyncClient(up.url, connect_timeout_s=START_S) as client:
            await local.until_serving(client, 2)
            assert await tokens_of(client) == expected
            assert sorted(hub.fetched_weights()) == sorted(everything)
            shares = [up.fetched_by(worker, everything) for worker in ("w0", "w1")]
            assert set.union(*shares) == everything
            assert all(share < everything for share in shares)

            hub.refusal = (500, "")
            local.start_worker("elsewhere")
            nodes = await local.until(client, "nodes", lambda found: len(found["workers"]) == 3)
            assert "elsewhere" in {worker["name"] for worker in nodes["workers"]}
            local.stop()


def test_pull_fetches_all_and_models_lists_it(folder: Path, hub: Hub, tmp_path: Path) -> None:
    """``swarm pull`` keeps the files that came before a failure, and fetches the others at its next call; then ``swarm
    models list`` shows the model without a request."""

    def swarm(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables(hub, tmp_path)}
        command = [sys.executable, "-m", "swarm", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)

    everything = sorted(path.name for path in folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    hub.cut[everything[-1]] = 100
    broken = swarm("pull", NAME)
    assert broken.returncode == 1
    assert everything[-1] in broken.stderr.splitlines()[-1]
    assert set(everything[:-1]) < set(hub.fetched_weights())
    hub.cut.clear()
    hub.asked.clear()
    pulled = swarm("pull", NAME, "--json")
    assert pulled.returncode == 0, pulled.stderr
    assert 0 < json.loads(pulled.stdout)["bytes"] <= num_bytes
    assert not set(everything[:-1]) & {*hub.fetched_weights(), *hub.parts()}
    hub.asked.clear()
    assert swarm("pull", NAME).returncode == 0
    listed = swarm("models", "list", "--json")
    demo, model = json.loads(listed.stdout)
    assert demo["name"] == "village (embedded)"
    assert (model["name"], model["missing_bytes"], model["weights"], model["problem"]) == (NAME, 0, "float32", "")
    assert hub.asked == []
