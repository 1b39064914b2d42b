"""Probes of a server: its models, the length of our words in its tokens, and whether its streams report usage."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import aiohttp
import msgspec

from swarm.bench.plan import ASSUMED, EXACT, BenchTarget, RequestShape, Scale
from swarm.bench.processes.exchange import ChunkMeter, HttpExchange
from swarm.bench.prompts import BenchRequest, PromptSource
from swarm.bench.records import RequestTiming
from swarm.errors import SwarmError

MODELS_TIMEOUT_S = 15.0
PROBES = (16, 144)  # lengths of the two probe prompts, in words


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(url: str, key: str | None) -> str:
    """Return the first model that the server lists. Raises SwarmError with a remedy if there is none."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{url}/models") as response,
        ):
            status, text = response.status, await response.content.read(1 << 20)
    except TimeoutError:
        raise SwarmError(f"{url}/models does not answer within {MODELS_TIMEOUT_S:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise SwarmError(f"no server answers at {url}: {error}") from None
    if status in (401, 403):
        raise SwarmError(f"{url}/models answers {status}: name the variable that holds the key with --api-key-env")
    try:
        models = msgspec.json.decode(text, type=_Models).data if status == 200 else []
    except msgspec.DecodeError:
        models = []
    if not models:
        raise SwarmError(f"{url}/models (status {status}) lists no model: is the URL right? Otherwise give --model")
    return models[0].id


async def calibrate(target: BenchTarget, shape: RequestShape) -> tuple[BenchTarget, Scale]:
    """Send a few short requests; return the target, adapted to what its streams report, and the scale of our words.

    Raises SwarmError if the server can't answer even these.
    """
    prompts = PromptSource(shape, EXACT)
    if shape.token_ids is not None:
        scale = EXACT
        await _require_answer(target, BenchRequest(0, list(range(shape.token_ids[0], shape.token_ids[0] + 1)), 1, 1))
    else:
        probes: list[tuple[int, int | None]] = []
        for number, words in enumerate(PROBES):
            job = BenchRequest(number, prompts.words(words, f"probe {number}"), words, 1)
            record = await _send_probe(replace(target, stream=False), job)
            if number == 0 and not record.is_ok:
                _raise_unusable(target, record)
            probes.append((words, record.prompt_tokens if record.is_ok else None))
        scale = fit_scale(probes)
    if target.stream and shape.token_ids is None:
        record = await _send_probe(target, BenchRequest(9, prompts.words(PROBES[0], "stream"), PROBES[0], 2))
        if record.outcome in ("http_400", "http_422"):  # the server does not support stream_options
            target = replace(target, asks_usage=False)
            record = await _send_probe(target, BenchRequest(9, prompts.words(PROBES[0], "stream"), PROBES[0], 2))
        if not record.is_ok:
            _raise_unusable(target, record)
    return target, scale


def fit_scale(probes: list[tuple[int, int | None]]) -> Scale:
    """Fit a line through (words, ``usage.prompt_tokens``) of the answered probes."""
    points = [(words, tokens) for words, tokens in probes if tokens is not None and tokens > 0]
    if not points:
        return ASSUMED
    words, tokens = points[0]
    if len(points) > 1:
        more_words, more_tokens = points[-1]
        per_word = (more_tokens - tokens) / (more_words - words)
        if per_word <= 0:  # the server reports the same number for every prompt
            return ASSUMED
        base = max(0.0, tokens - words * per_word)
        return Scale(round(base, 2), round(per_word, 4), _describe(base, per_word))
    return Scale(0.0, round(tokens / words, 4), _describe(0.0, tokens / words))


def _describe(base: float, per_word: float) -> str:
    around = f" and {base:.0f} around them" if base >= 0.5 else ""
    return f"calibrated by usage.prompt_tokens: {per_word:.2f} tokens a word{around}"


async def _require_answer(target: BenchTarget, job: BenchRequest) -> None:
    record = await _send_probe(target, job)
    if not record.is_ok:
        _raise_unusable(target, record)


async def _send_probe(target: BenchTarget, job: BenchRequest) -> RequestTiming:
    now = time.monotonic()
    async with HttpExchange(target, ChunkMeter(now, float("inf"), 1.0)) as exchange:
        record, _ = await exchange.send_request(job, now)
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError
    return record


def _raise_unusable(target: BenchTarget, record: RequestTiming) -> None:
    hint = {
        "http_401": ": name the variable that holds the key with --api-key-env",
        "http_403": ": name the variable that holds the key with --api-key-env",
        "http_404": f": is {target.url} the right URL, and {target.model!r} a model of it?",
        "timeout": ": --timeout sets how long to wait",
    }.get(record.outcome, "")
    raise SwarmError(f"{target.url} can't answer even a short request: {record.detail or record.outcome}{hint}")
