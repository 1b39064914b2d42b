"""Requests that outlive whoever made them: read on from another process, after their end, after the broker's death."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from swarm import AsyncClient, InvalidRequest, SamplingParams
from swarm.client.request import RequestSpec
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.messages import Accepted, Ack, Finished, Submit, Tokens
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.integration.test_many_clients import Dealer

PROMPT = [1, 5, 9, 13]
LONG = 600  # tokens: some seconds on a busy machine
MORE_THAN_A_WINDOW = 300


@pytest.fixture(scope="module")
def swarm(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = {"SWARM_STATE_DIR": str(tmp_path_factory.mktemp("state")), "SWARM_BROKER__RETAIN_S": "1"}
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), options=options, launch=zygote) as processes:
        processes.start(2)
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 2)
        yield client


async def until_gone(swarm: Processes, client: AsyncClient) -> None:
    """Wait until the broker has nothing of any request in memory."""
    await swarm.until(client, "status", lambda s: s["num_requests"] == 0)


async def read(client: AsyncClient, request_id: str, first: int = 0) -> list[int]:
    return [p.token async for p in client.attach(request_id, first, timeout=60) if p.token is not None]


def command(swarm: Processes, *arguments: str) -> str:
    """Run a command as a process of its own; return what it prints."""
    whole = [sys.executable, "-m", "swarm", *arguments, "--url", swarm.url]
    done = subprocess.run(whole, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_read_while_it_runs_after_it_ended_and_from_the_journal(swarm: Processes, client: AsyncClient) -> None:
    """The same tokens each time, from wherever the reader wants them."""
    expected = (await client.generate(PROMPT, max_tokens=200, ignore_eos=True, seed=3)).tokens
    request_id = await client.submit(PROMPT, max_tokens=200, ignore_eos=True, seed=3)
    assert await read(client, request_id, 150) == list(expected[150:])
    await until_gone(swarm, client)
    async with AsyncClient(swarm.url) as another:
        stream = another.attach(request_id, 190)
        assert [piece.token async for piece in stream] == list(expected[190:])
        completion = stream.completion
    assert completion is not None
    assert (completion.tokens, completion.finish_reason, completion.seed) == (expected, "length", 3)


async def test_looked_up_beside_its_reader(swarm: Processes, client: AsyncClient) -> None:
    """What has come so far, as often as somebody asks, while it runs, after its end and from the journal; and its
    reader reads it all."""
    expected = (await client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, seed=3)).tokens
    async with AsyncClient(swarm.url) as another:
        stream = client.stream(PROMPT, max_tokens=LONG, ignore_eos=True, seed=3, request_id="seen")
        told = [(await anext(stream)).token]
        found = await asyncio.gather(*(another.look_up("seen") for _ in range(8)))
        for progress in found:
            assert progress.submit.prompt == tuple(PROMPT)
            tokens = [piece.token for piece in progress.pieces]
            assert tokens == list(expected[: len(tokens)])
        told += [piece.token async for piece in stream if piece.token is not None]
        assert told == list(expected)
        await until_gone(swarm, client)
        questions = [another.look_up("seen") for _ in range(8)]
        submits = [another.recall("seen") for _ in range(8)]
        for progress in await asyncio.wait_for(asyncio.gather(*questions), 20):
            assert progress.completion is not None
            assert (progress.completion.tokens, progress.completion.finish_reason) == (expected, "length")
        await until_gone(swarm, client)
        assert {submit.request_id for submit in await asyncio.wait_for(asyncio.gather(*submits), 20)} == {"seen"}
        with pytest.raises(InvalidRequest, match="not known"):
            await another.look_up("nobodys")


async def test_read_on_after_the_broker_died(swarm: Processes, client: AsyncClient) -> None:
    """In the middle of an answer that nobody reads; the one who reads then gets what an undisturbed run gives."""
    expected = (await client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=4)).tokens
    # without proposals: the known answer would be guessed, and over before the death
    request_id = await client.submit(
        PROMPT, max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=4, speculation="off"
    )
    async with AsyncClient(swarm.url) as early:  # it sees the beginning, and dies
        async for piece in early.attach(request_id):
            if piece.index == 20:
                break
    await swarm.restart_broker(client, 2)
    assert await read(client, request_id, 21) == list(expected[21:])
    await until_gone(swarm, client)
    await swarm.restart_broker(client, 2)
    assert await read(client, request_id) == list(expected)


async def test_submitted_again_after_a_restart(swarm: Processes, client: AsyncClient) -> None:
    """Same id and body: the same request, from its first token on, also when only the journal knows it."""
    options = {"max_tokens": 30, "ignore_eos": True, "seed": 5, "request_id": "again"}
    first = await client.generate(PROMPT, **options)  # type: ignore[arg-type]
    before = (await client.query("stats"))["pipeline"]["tokens"]  # type: ignore[index]
    async with AsyncClient(swarm.url) as another:
        assert (await another.generate(PROMPT, **options)).tokens == first.tokens  # type: ignore[arg-type]
    assert (await client.query("stats"))["pipeline"]["tokens"] == before  # type: ignore[index]
    await swarm.restart_broker(client, 2)
    assert (await client.generate(PROMPT, **options)).tokens == first.tokens  # type: ignore[arg-type]
    assert (await client.query("stats"))["pipeline"].get("tokens", 0) == 0  # type: ignore[index, attr-defined]
    with pytest.raises(InvalidRequest) as caught:
        await client.generate([*PROMPT, 2], **options)  # type: ignore[arg-type]
    assert caught.value.code == "conflict"


async def test_nobody_knows_it(client: AsyncClient) -> None:
    """One clear error, whatever was wanted of it."""
    for what in (read(client, "nonsense"), client.cancel("nonsense"), client.recall("nonsense")):
        with pytest.raises(InvalidRequest, match="this request is not known") as caught:
            await what  # type: ignore[misc]
        assert caught.value.code == "unknown"


async def test_cancelled_from_elsewhere(swarm: Processes, client: AsyncClient) -> None:
    """A detached request has no caller who could end it: anybody who knows its id can."""
    request_id = await client.submit(PROMPT, max_tokens=4000, ignore_eos=True)
    async with AsyncClient(swarm.url) as another:
        await another.cancel(request_id)
    await swarm.until(client, "status", lambda s: s["num_running"] == 0 and s["num_requests"] == 0, within_s=10)


async def test_whoever_vanishes_is_cancelled_whoever_detached_is_not(swarm: Processes, client: AsyncClient) -> None:
    """The processes are killed: no last words. The grace is short here, or the answers would be ready before."""
    await swarm.restart_broker(client, 2, SWARM_BROKER__CLIENT_GRACE_S="0.5")
    script = (
        "import asyncio, os, sys\nfrom swarm import AsyncClient\n"
        "async def main():\n"
        "    client = AsyncClient(sys.argv[1])\n"
        "    async for piece in client.stream([1, 2, 3], max_tokens=3000, ignore_eos=True, seed=1,\n"
        "                                     detached=sys.argv[2] == 'yes', request_id='of-' + sys.argv[2]):\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    for detached in ("yes", "no"):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, swarm.url, detached)
        assert await asyncio.wait_for(process.wait(), 60) == -9

    def states(report: dict[str, object]) -> dict[str, object]:
        rows = [*report["requests"], *report["kept"]]  # type: ignore[misc]
        return {row["request_id"]: row["reasons"] for row in rows}

    found = await swarm.until(client, "requests", lambda r: states(r).get("of-no") == ["cancelled"], within_s=30)
    assert states(found)["of-yes"] != ["cancelled"]
    await client.cancel("of-yes")
    await swarm.restart_broker(client, 2)


async def test_the_commands(swarm: Processes, client: AsyncClient) -> None:
    """``generate --detach`` prints what ``attach`` takes; lists and traces know of it, also after a restart."""
    printed = await asyncio.to_thread(
        command, swarm, "generate", "--tokens", "1,5,9", "--max-tokens", "12", "--seed", "1", "--detach"
    )
    request_id = printed.strip()
    told = await asyncio.to_thread(command, swarm, "attach", request_id, "--from", "4")
    whole = json.loads(await asyncio.to_thread(command, swarm, "attach", request_id, "--json"))
    assert told.strip() == ",".join(map(str, whole["tokens"][4:]))
    await until_gone(swarm, client)
    await swarm.restart_broker(client, 2)
    kept = (await client.query("requests"))["kept"]
    assert request_id in [each["request_id"] for each in kept]  # type: ignore[attr-defined]
    trace = await client.trace(request_id[:8])
    assert trace["request_id"] == request_id
    assert "only kept in memory" in str(trace["times"])


async def test_a_reader_who_never_reads(swarm: Processes, client: AsyncClient) -> None:
    """It is sent a window's worth. Its request ends, and leaves the broker's memory; when it reads at last, it gets
    every token once, from the journal."""
    wish = RequestSpec(SamplingParams(max_tokens=MORE_THAN_A_WINDOW, ignore_eos=True))
    submit = Submit(request_id="slow", prompt=tuple(PROMPT), params=wish.params, seed=6)
    with Dealer(swarm.url) as slow:
        slow.send(CLIENT.encode(submit))
        await swarm.until(client, "status", lambda s: s["num_requests"] == 1)
        await until_gone(swarm, client)  # it ended, and was retained for a second
        tokens: list[int] = []
        num_before = 0
        while True:
            message, _ = SERVER.decode(await slow.receive())
            if isinstance(message, Finished):
                break
            if isinstance(message, Tokens):
                assert message.start == len(tokens)
                tokens += message.ids
                if len(tokens) == 256:
                    num_before = len(tokens)
                    slow.send(CLIENT.encode(Ack(request_id="slow", index=0, next_index=len(tokens))))
                elif len(tokens) > 256:
                    slow.send(CLIENT.encode(Ack(request_id="slow", index=0, next_index=len(tokens))))
            else:
                assert isinstance(message, Accepted)
    assert num_before == 256
    assert tokens == list(
        (await client.generate(PROMPT, max_tokens=MORE_THAN_A_WINDOW, ignore_eos=True, seed=6)).tokens
    )
