"""Embeddings from real processes: transformers' own, with the same bits alone, in a crowd and over cuts."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from swarm import AsyncClient, Embedding, InvalidRequest, SamplingParams
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures

TOLERANCE = 1e-5
PROMPTS = [[3 + (7 * n * j + j * j) % 450 for j in range(length)] for n, length in enumerate((1, 40, 300, 64, 700, 90))]
MEAN = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@pytest.fixture(scope="module")
def mean_model(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, with settings of sentence-transformers: the mean, not normalised."""
    folder = tmp_path_factory.mktemp("mean") / "mean"
    shutil.copytree(random_llama, folder)
    (folder / "modules.json").write_text(json.dumps(MEAN))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


def outputs(folder: Path) -> list[torch.Tensor]:
    whole = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [whole(torch.tensor([prompt]), use_cache=False).last_hidden_state[0] for prompt in PROMPTS]


def bits(embeddings: list[Embedding]) -> list[bytes]:
    return [embedding.vector.tobytes() for embedding in embeddings]


async def embed_in_many_ways(client: AsyncClient) -> list[Embedding]:
    """All at once, one by one, and in a crowd beside answers: the same bits."""
    together = await client.embed(PROMPTS)
    for place in (0, 4):
        assert bits(await client.embed([PROMPTS[place]])) == bits([together[place]])
    answering = [asyncio.create_task(client.generate(PROMPTS[n], max_tokens=60, ignore_eos=True)) for n in (1, 2, 3)]
    crowd = await asyncio.gather(*(client.embed(PROMPTS) for _ in range(8)))
    await asyncio.gather(*answering)
    assert all(bits(embeddings) == bits(together) for embeddings in crowd)
    return together


async def embed_cut(swarm: Processes, num_stages: int) -> list[Embedding]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, num_stages)
        return await embed_in_many_ways(client)


def differences(embeddings: list[Embedding], expected: list[torch.Tensor]) -> list[float]:
    pairs = zip(embeddings, expected, strict=True)
    return [float(np.abs(np.array(e.vector) - t.numpy()).max() / t.abs().max()) for e, t in pairs]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_bits_are_the_same_over_cuts_and_chunks(
    random_llama: Path, mean_model: Path, zygote: Zygote, tmp_path: Path, pooling: str
) -> None:
    """In one, two and three stages, with other chunks in each, against transformers."""
    folder = random_llama if pooling == "last" else mean_model
    found: list[list[Embedding]] = []
    for num_stages, chunk in ((1, "256"), (2, "7"), (3, "100")):
        logs = tmp_path / str(num_stages)
        logs.mkdir()
        options = {"SWARM_BROKER__PREFILL_CHUNK": chunk}
        with Processes(folder, logs, options=options, launch=zygote) as swarm:
            swarm.start(num_stages)
            found.append(asyncio.run(embed_cut(swarm, num_stages)))
    assert bits(found[0]) == bits(found[1]) == bits(found[2])
    whole = outputs(folder)
    expected = [t.double().mean(0).float() if pooling == "mean" else t[-1] / t[-1].norm() for t in whole]
    assert max(differences(found[0], expected)) < TOLERANCE
    assert [embedding.num_prompt for embedding in found[0]] == [len(prompt) for prompt in PROMPTS]


async def test_what_a_caller_asks_for(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            [whole] = await client.embed(PROMPTS[3:4])
            [short] = await client.embed(PROMPTS[3:4], dimensions=8)
            wanted = np.array(whole.vector[:8], np.float64)
            assert np.allclose(short.vector, wanted / np.linalg.norm(wanted), atol=1e-6)
            context = (await client.describe()).max_context
            full = [5] * context
            [embedded] = await client.embed([full], truncate=None)
            assert embedded.num_prompt == context
            [cut] = await client.embed([[*full, 6, 7]], truncate=context)
            assert cut.vector == embedded.vector
            await _refused(client, [[*full, 6]], "context")
            await _refused(client, [[501]], "invalid")
            await _refused(client, ["a text"], "tokenizer")
            await _refused(client, PROMPTS[:1], "dimensions", dimensions=65)
            await _refused(client, PROMPTS[:1], "truncate", truncate=0)
            with pytest.raises(InvalidRequest, match="no classification head"):
                await client.rerank("query", ["document"])


async def test_a_repeated_request_gets_the_vectors_that_the_broker_has(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """As a gateway repeats the lines of a batch: nothing is computed again, even by the next broker."""
    prompts, params = [tuple(prompt) for prompt in PROMPTS[:3]], SamplingParams(vector="mean", seed=1)
    options = {"SWARM_STATE_DIR": str(tmp_path / "state")}
    with Processes(random_llama, tmp_path, launch=zygote, options=options) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            first = await client.compute_vectors(prompts, params, request_id="line", detached=True)
            await swarm.restart_broker(client, 1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            again = await client.compute_vectors(prompts, params, request_id="line", detached=True)
            counters = await figures(client)
        assert [(answer.request_id, answer.vector) for answer in again] == [
            (answer.request_id, answer.vector) for answer in first
        ]
        assert [answer.request_id for answer in first] == ["line-0", "line-1", "line-2"]
        assert counters.get("vectors", 0) == 0


async def _refused(client: AsyncClient, prompts: list[Any], code: str, **options: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.embed(prompts, **options)
    assert caught.value.code == code
