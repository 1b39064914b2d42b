"""Embeddings and scores from the vectors that the last stage returns: the same bits on every machine."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Sequence

from swarm.client.results import RankedDocument, VectorAnswer
from swarm.errors import InvalidRequest
from swarm.params import SamplingParams, VectorKind
from swarm.wire.messages import Manifest, Pooling

DEFAULT_POOLING = Pooling("last", True)  # of a model whose folder states none
POOLINGS: dict[str, VectorKind] = {"last": "last", "mean": "mean"}
SCORES = SamplingParams(vector="scores")


def find_pooling(manifest: Manifest) -> Pooling:
    """Return how this model makes embeddings. Raises InvalidRequest if it makes none, or none that can be served."""
    if reason := manifest.why_unable("last"):
        raise InvalidRequest(reason, code="unsupported_task")
    pooling = manifest.pooling or DEFAULT_POOLING
    if pooling.kind not in POOLINGS:
        reason = f"{manifest.name} pools by {pooling.kind}, which can't be served: use a model that pools by "
        raise InvalidRequest(reason + " or ".join(POOLINGS), code="unsupported_task")
    return pooling


def embedding_params(pooling: Pooling) -> SamplingParams:
    return SamplingParams(vector=POOLINGS[pooling.kind])


def check_reranks(manifest: Manifest) -> None:
    """Raise InvalidRequest unless the model gives one score to a query and a document."""
    reason = manifest.why_unable("scores")
    if manifest.num_labels > 1:
        reason = f"{manifest.name} gives {manifest.num_labels} scores, not 1: serve a model for reranking"
    if reason:
        raise InvalidRequest(reason, code="unsupported_task")


def check_dimensions(dimensions: int | None, manifest: Manifest) -> None:
    if dimensions is not None and not 1 <= dimensions <= manifest.hidden_size:
        reason = f"dimensions must be between 1 and {manifest.hidden_size}, not {dimensions}"
        raise InvalidRequest(reason, code="dimensions")


def to_numbers(vector: bytes) -> array.array[float]:
    """Decode a vector of the wire."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def to_embedding(vector: bytes, pooling: Pooling, dimensions: int | None) -> array.array[float]:
    """Return an embedding: the first ``dimensions`` numbers, scaled to length 1 if the model does that. The squares of
    float32 are exact in float64, and their sum is rounded once, so the bits do not depend on the processor."""
    numbers = to_numbers(vector)[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in numbers)) if pooling.normalizes else 1.0
    return array.array("f", (number / length for number in numbers)) if length not in (0.0, 1.0) else numbers


def rank_documents(answers: Sequence[VectorAnswer]) -> list[RankedDocument]:
    """Return the documents with their scores, the best first, and equal ones in their order."""
    ranked = [RankedDocument(n, to_score(answer.vector), answer.num_prompt) for n, answer in enumerate(answers)]
    return sorted(ranked, key=lambda document: -document.score)


def to_score(vector: bytes) -> float:
    """Return the score of a document, between 0 and 1: the logistic function of the head's only number."""
    number = to_numbers(vector)[0]
    return 1 / (1 + math.exp(-number)) if number >= 0 else math.exp(number) / (1 + math.exp(number))
