"""A broker and three workers as real processes: what users rely on, from their side of the wire."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq

from swarm import AsyncClient, Completion, InvalidRequest, RequestCancelled
from swarm.wire.codec import CLIENT
from swarm.wire.messages import Cancel
from tests.faults.zygote import Zygote
from tests.integration.processes import START_S, Processes
from tests.model.models import VOCABULARY, load_whole

NUM_REQUESTS = 200
NUM_CLIENTS = 20


@pytest.fixture(scope="module")
def swarm(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = {"SWARM_BROKER__PREFIX_CACHE": "false"}  # what is kept on purpose would hide what is left behind
    # A busy machine makes workers slower than they measured, or silent for seconds: layers would move while descriptors
    # are counted, and another plan has other connections.
    options |= {"SWARM_PLAN__OBJECTIVE": "throughput", "SWARM_PLAN__MARGIN": "10"}
    options |= {"SWARM_HEALTH__BEAT_LEAST_S": "20.0", "SWARM_HEALTH__BEAT_TIMEOUT_S": "20.0"}
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), options=options, launch=zygote) as processes:
        processes.start(3)
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 3)
        yield client


@dataclass(frozen=True)
class Case:
    """One request of the crowd."""

    prompt: tuple[int, ...]
    options: dict[str, object]
    leaves_after: int | None = None


def make_cases(seed: int) -> list[Case]:
    chance = random.Random(seed)
    return [_make_case(chance) for _ in range(NUM_REQUESTS)]


def _make_case(chance: random.Random) -> Case:
    length = chance.choice([1, 3, 31, 32, 33, 64, 100, 300])
    options: dict[str, object] = {"max_tokens": chance.choice([1, 2, 8, 24]), "seed": chance.randrange(2**32)}
    if chance.random() < 0.6:
        options |= {"temperature": chance.choice([0.5, 1.0, 1.5]), "top_p": chance.choice([0.9, 1.0])}
        options |= {"top_k": chance.choice([0, 5, 50]), "min_p": chance.choice([0.0, 0.05])}
    if chance.random() < 0.3:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    if chance.random() < 0.2:
        options |= {"logprobs": 3}
    if chance.random() < 0.1:
        options |= {"n": 2}
    prompt = tuple(chance.randrange(3, VOCABULARY) for _ in range(length))
    return Case(prompt, options, chance.choice([1, 4]) if chance.random() < 0.15 else None)


async def ask(client: AsyncClient, case: Case) -> Completion | None:
    """The answer, or None if the caller leaves in the middle of it."""
    if case.leaves_after is None:
        return await client.generate(case.prompt, timeout=240, **case.options)  # type: ignore[arg-type]
    taken = 0
    async with client.stream(case.prompt, timeout=240, **case.options) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            taken += 1
            if taken >= case.leaves_after:
                break
    return None


async def everything_idle(swarm: Processes, client: AsyncClient) -> None:
    """Nothing of any sequence is left anywhere."""

    def is_idle(status: dict[str, object]) -> bool:
        return all(status[key] == 0 for key in ("num_running", "num_queued", "num_requests", "steps_in_flight"))

    def is_empty(stats: dict[str, object]) -> bool:
        stages = stats["stages"]
        assert isinstance(stages, dict)
        wanted = ("sequences", "kv_used", "log_bytes")
        return len(stages) == 3 and all(stage.get(key) == 0 for stage in stages.values() for key in wanted)

    await swarm.until(client, "status", is_idle)
    await swarm.until(client, "stats", is_empty)


async def crowd(swarm: Processes, cases: list[Case]) -> list[Completion | None]:
    """Twenty clients, each with its share of the requests, all at once."""

    async def one(cases: list[tuple[int, Case]]) -> list[tuple[int, Completion | None]]:
        async with AsyncClient(swarm.url) as client:
            return list(
                zip([n for n, _ in cases], await asyncio.gather(*(ask(client, c) for _, c in cases)), strict=True)
            )

    numbered = list(enumerate(cases))
    shares = await asyncio.gather(*(one(numbered[i::NUM_CLIENTS]) for i in range(NUM_CLIENTS)))
    return [answer for _, answer in sorted((item for share in shares for item in share), key=lambda item: item[0])]


async def settled_figures(swarm: Processes) -> dict[str, tuple[int, int]]:
    """Threads and descriptors of each process, when the connections that clients have closed have ended."""
    last, figures = {}, swarm.figures()
    while figures != last:
        await asyncio.sleep(1.0)
        last, figures = figures, swarm.figures()
    return figures


async def grown_since(swarm: Processes, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the figures of processes with more threads or descriptors than before. Connections that clients closed
    take a moment to end; some may have been open still in the first figures."""
    give_up_at = time.monotonic() + START_S
    while grown := {
        name: now
        for name, now in swarm.figures().items()
        if any(count > old for count, old in zip(now, before[name], strict=True))
    }:
        if time.monotonic() > give_up_at:
            break
        await asyncio.sleep(0.1)
    return grown


async def plan_in_force(client: AsyncClient) -> object:
    """Its number. Another plan has other connections: the worker in the middle has one more for copies."""
    return (await client.query("status"))["epoch"]


async def test_a_crowd_is_served_rightly_and_leaves_nothing_behind(swarm: Processes, client: AsyncClient) -> None:
    """200 requests of mixed lengths and parameters from 20 clients, some of whom leave in the middle: all others end
    rightly, with the very tokens that they get alone; afterwards every stage is empty, and no thread, socket or
    descriptor is left."""
    await crowd(swarm, make_cases(1)[:40])  # once around, so that pools and caches have their size
    await everything_idle(swarm, client)
    plan, before = await plan_in_force(client), await asyncio.wait_for(settled_figures(swarm), START_S)

    cases = make_cases(2)
    answers = await crowd(swarm, cases)

    for case, answer in zip(cases, answers, strict=True):
        if answer is None:
            assert case.leaves_after is not None
            continue
        for choice in answer.choices:
            assert choice.finish_reason in ("length", "stop")
            assert 1 <= len(choice.tokens) <= case.options["max_tokens"]  # type: ignore[operator]
            assert len(choice.logprobs) == (len(choice.tokens) if "logprobs" in case.options else 0)
    await everything_idle(swarm, client)
    assert await plan_in_force(client) == plan, "a worker was lost, or came back: see the broker's log"

    if await grown_since(swarm, before):  # what is made once, between workers, may have been made only now
        before = await asyncio.wait_for(settled_figures(swarm), START_S)
        await crowd(swarm, cases[:40])
        await everything_idle(swarm, client)
        assert await grown_since(swarm, before) == {}

    stayed = [i for i, case in enumerate(cases) if case.leaves_after is None]
    for index in stayed[:: len(stayed) // 25]:
        alone = await ask(client, cases[index])
        crowded = answers[index]
        assert alone is not None
        assert crowded is not None
        assert [c.tokens for c in alone.choices] == [c.tokens for c in crowded.choices], cases[index]


async def test_greedy_tokens_are_those_of_transformers(
    swarm: Processes, client: AsyncClient, random_llama: Path
) -> None:
    """The swarm gives what the whole model gives in one process."""
    import torch

    whole = load_whole(random_llama)
    for length in (1, 33, 200):
        prompt = [(7 * i + length) % (VOCABULARY - 3) + 3 for i in range(length)]
        expected = whole.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, attention_mask=torch.ones(1, length)
        )
        answer = await client.generate(prompt, max_tokens=24, timeout=60)
        assert list(answer.tokens) == expected[0, length:].tolist()


async def test_seeded_sampling_is_reproducible_and_seeds_differ(client: AsyncClient) -> None:
    """The same seed gives the same tokens; another seed, and another continuation of the same request, others."""
    first = await client.generate([5, 6, 7], max_tokens=16, temperature=1.0, seed=11, n=2, timeout=60)
    again = await client.generate([5, 6, 7], max_tokens=16, temperature=1.0, seed=11, n=2, timeout=60)
    other = await client.generate([5, 6, 7], max_tokens=16, temperature=1.0, seed=12, timeout=60)
    assert [c.tokens for c in first.choices] == [c.tokens for c in again.choices]
    assert first.choices[0].tokens != first.choices[1].tokens
    assert other.tokens != first.tokens


async def test_hops_account_for_every_token(client: AsyncClient) -> None:
    """Per token and per stage, the stream says who computed which layers and how long."""
    async with client.stream([5, 6, 7], max_tokens=4, hops=True, timeout=60) as stream:
        pieces = [piece async for piece in stream]
    assert [piece.index for piece in pieces] == [0, 1, 2, 3]
    for piece in pieces:
        assert len(piece.hops) == 3
        assert [hop.layers.first for hop in piece.hops] == [0, piece.hops[0].layers.stop, piece.hops[1].layers.stop]
        assert piece.hops[-1].layers.stop == 8
        assert all(hop.compute_s > 0 for hop in piece.hops)


BAD_REQUESTS: list[tuple[list[int] | str, dict[str, object], str]] = [
    ([], {}, "empty"),
    ([5] * 1024, {}, "1024 tokens"),
    ([5, VOCABULARY], {}, "out of range"),
    ([5, -1], {}, "-1"),
    ([5], {"max_tokens": 0}, "max_tokens"),
    ([5], {"max_tokens": -3}, "max_tokens"),
    ([5], {"max_tokens": 10**30}, "max_tokens"),
    ([5], {"max_tokens": "many"}, "max_tokens"),
    ([5], {"temperature": float("nan")}, "temperature"),
    ([5], {"temperature": -1.0}, "temperature"),
    ([5], {"top_p": 0.0}, "top_p"),
    ([5], {"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
    ([5], {"stop_token_ids": (VOCABULARY,)}, "stop_token_ids"),
    ([5], {"colour": "red"}, "colour"),
    ("a text", {}, "tokenizer"),
]


@pytest.mark.parametrize(("prompt", "options", "names"), BAD_REQUESTS)
async def test_bad_requests_get_one_clear_error_and_the_next_is_served(
    client: AsyncClient, prompt: list[int] | str, options: dict[str, object], names: str
) -> None:
    """What is wrong is named; nothing else is disturbed."""
    with pytest.raises(InvalidRequest, match=names):
        await client.generate(prompt, timeout=60, **options)  # type: ignore[arg-type]
    assert len((await client.generate([5], max_tokens=2, timeout=60, ignore_eos=True)).tokens) == 2


async def test_cancelled_by_another(client: AsyncClient, swarm: Processes) -> None:
    """A request that somebody else cancels by its id ends with that error, at once."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.connect(swarm.url)
        async with client.stream([9], max_tokens=900, ignore_eos=True, request_id="mine") as stream:
            await anext(stream)
            other.send_multipart(CLIENT.encode(Cancel(request_id="mine")))
            with pytest.raises(RequestCancelled):
                async for _ in stream:
                    pass
    await everything_idle(swarm, client)


async def test_a_killed_worker_costs_time_not_tokens(
    random_llama: Path, zygote: Zygote, tmp_path: Path, swarm: Processes, client: AsyncClient
) -> None:
    """A worker dies in the middle of answers, a new one takes its place: every token comes once, as undisturbed."""
    cases = [replace(case, leaves_after=None) for case in make_cases(3)[:12]]
    for case in cases:
        case.options.update(max_tokens=40, ignore_eos=True)
    undisturbed = await asyncio.gather(*(ask(client, case) for case in cases))
    with Processes(random_llama, tmp_path, launch=zygote) as doomed:
        doomed.start(3)
        async with AsyncClient(doomed.url, connect_timeout_s=60) as disturbed:
            await doomed.until_serving(disturbed, 3)
            answers = asyncio.gather(*(ask(disturbed, case) for case in cases))
            await doomed.until(disturbed, "status", lambda s: s["tokens_total"] >= 60)
            doomed.kill("w1")
            doomed.start_worker("w1")
            for answer, expected in zip(await answers, undisturbed, strict=True):
                assert answer is not None
                assert expected is not None
                assert [c.tokens for c in answer.choices] == [c.tokens for c in expected.choices]
            await doomed.until_serving(disturbed, 3)
            stats = await disturbed.query("stats")
            assert stats["pipeline"]["workers_lost"] >= 1  # type: ignore[index]
        assert doomed.stop() == [143, 143, 143, 0]
