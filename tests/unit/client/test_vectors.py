"""Embeddings and scores from the last stage's vectors."""

from __future__ import annotations

import array
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
from msgspec.structs import replace

from swarm.client.client import AsyncClient
from swarm.client.results import VectorAnswer
from swarm.client.vectors import SCORES, check_reranks, find_pooling, rank_documents, to_embedding
from swarm.errors import InvalidRequest, RequestFailed
from swarm.testing import fake_manifest
from swarm.wire.messages import Pooling

LAST = Pooling("last", True)
VECTOR = array.array("f", [3.0, -4.0, 12.0]).tobytes()


def answer(logit: float) -> VectorAnswer:
    return VectorAnswer("r", array.array("f", [logit]).tobytes(), 7)


def test_an_embedding_has_length_one_if_the_model_normalises() -> None:
    assert to_embedding(VECTOR, LAST, None) == array.array("f", [3 / 13, -4 / 13, 12 / 13])
    assert to_embedding(VECTOR, Pooling("mean", False), None) == array.array("f", [3.0, -4.0, 12.0])


def test_fewer_dimensions_are_cut_before_they_are_scaled() -> None:
    assert to_embedding(VECTOR, LAST, 2) == array.array("f", [0.6, -0.8])
    assert to_embedding(VECTOR, Pooling("mean", False), 1) == array.array("f", [3.0])


def test_a_vector_of_zeros_stays() -> None:
    zeros = array.array("f", [0.0, 0.0])
    assert to_embedding(zeros.tobytes(), LAST, None) == zeros


def test_documents_are_ranked_by_the_logistic_function_of_their_logits() -> None:
    ranked = rank_documents([answer(-1.0), answer(2.0), answer(-1.0), answer(-1000.0), answer(1000.0)])
    assert [document.index for document in ranked] == [4, 1, 0, 2, 3]
    assert [document.score for document in ranked][:2] == [1.0, 1 / (1 + math.exp(-2.0))]
    assert ranked[-1].score == 0.0


@pytest.mark.parametrize("num_labels", [0, 3])
def test_only_one_label_ranks(num_labels: int) -> None:
    with pytest.raises(InvalidRequest, match="serve a model for reranking") as caught:
        check_reranks(replace(fake_manifest(), num_labels=num_labels))
    assert caught.value.code == "unsupported_task"
    check_reranks(replace(fake_manifest(), num_labels=1))


def test_a_model_embeds_as_its_folder_states() -> None:
    manifest = fake_manifest()
    assert find_pooling(manifest) == LAST
    assert find_pooling(replace(manifest, pooling=Pooling("mean", False))) == Pooling("mean", False)
    for changes, why in (({"pooling": Pooling("cls", True)}, "pools by cls"), ({"num_labels": 2}, "scores only")):
        with pytest.raises(InvalidRequest, match=why) as caught:
            find_pooling(replace(manifest, **changes))
        assert caught.value.code == "unsupported_task"


@pytest.mark.parametrize("vector", [None, b""])
async def test_a_request_that_ends_without_a_vector_has_failed(vector: bytes | None) -> None:
    """A vector of no numbers would be an embedding, too."""

    class Stream:
        """A request that has ended."""

        ended_calls: ClassVar = {
            0: SimpleNamespace(submit=SimpleNamespace(request_id="r"), end=SimpleNamespace(vector=vector))
        }

        async def take_ready(self) -> list[object]:
            return []

    async with AsyncClient("tcp://127.0.0.1:9") as client:
        client._stream = lambda *_: Stream()  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(RequestFailed, match="r without a vector"):
            await client.compute_vectors([(1, 2)], SCORES)
