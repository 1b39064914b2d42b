"""Workers that send what can't be true: real processes, and the same answers as undisturbed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq

from swarm import AsyncClient
from tests.faults.bench import Answers, Bench, Swarm, long
from tests.faults.proxy import Doorman, Passage
from tests.faults.zygote import Zygote

ASIDE = 10_000  # how far from its port a worker is told to be, for somebody to stand there


@pytest.mark.parametrize("place", [*long(0), 1], ids=["first", "middle"])
async def test_hidden_states_that_are_not_finite(bench: Bench, place: int) -> None:
    """One NaN among the hidden states of a step: the stage behind refuses it, the sender is out at once and is shown
    with the evidence, others take its layers, and the answers are the same to the last bit. It is not dead: it joins
    anew, as the process it was."""
    name = await bench.arm(place, "step.computed=nan@20")
    pid = bench.swarm.workers[name].pid
    before = await bench.figures()
    reporter = (await bench.order())[place + 1]
    async with bench.under_load(warm=0):
        node = await bench.until_out(name)
    assert node["verdict"] == "lied"
    assert node["evidence"].startswith(f"it sent {reporter} hidden states that are not finite, out of layers ")
    after = await bench.figures()
    assert after["not_finite"] == before.get("not_finite", 0) + 1
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1
    assert after.get("sequences_at_deaths", 0) == before.get("sequences_at_deaths", 0), "no request is to blame"
    await bench.serving()
    assert (await bench.node(name))["pid"] == pid
    await bench.right()


async def test_a_worker_that_goes_on_lying(bench: Bench) -> None:
    """From its twentieth step on, whatever it computes is not finite. Others do its work, it is called back less and
    less often, and no request fails for it."""
    name = await bench.arm(0, "step.computed=nan@20+")
    async with bench.under_load(warm=0):
        await bench.until_out(name)
    await bench.right()
    assert (await bench.figures())["not_finite"] >= 1


@pytest.fixture(scope="module")
def rechecking(model: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A swarm in which everybody keeps all layers warm, and often computes again what another one computed."""
    options = {"SWARM_RECOVERY__RECHECK_EVERY_S": "0.05", "SWARM_PLAN__STANDBY": "all"}
    with Swarm(model, tmp_path_factory.mktemp("rechecking"), zygote, options) as swarm:
        swarm.start(3)
        yield swarm


@pytest_asyncio.fixture
async def watched(rechecking: Swarm, expected: Answers) -> AsyncIterator[Bench]:
    async with AsyncClient(rechecking.url, connect_timeout_s=60.0) as client:
        bench = Bench(rechecking, client, expected)
        await bench.make_well()
        await all_warm(bench)
        yield bench


async def all_warm(bench: Bench) -> None:
    def is_warm(report: dict[str, Any]) -> bool:
        nodes = [n for n in report["workers"] if n["layers"] is not None]
        return len(nodes) == 3 and all(n["standby"] for n in nodes)

    await bench.swarm.until(bench.client, "nodes", is_warm)


async def test_honest_workers_agree(watched: Bench) -> None:
    """What each stage computed is computed again by others, the same to the last bit, while answers run as ever."""
    before = await watched.figures()
    for _ in range(20):
        await watched.right()
        nodes = await watched.nodes()
        if all(node["confirmed"] for node in nodes if node["state"] == "member"):
            break
    assert all(node["confirmed"] for node in nodes if node["state"] == "member"), nodes
    after = await watched.figures()
    assert after["rechecks_agreed"] > before.get("rechecks_agreed", 0)
    assert after.get("rechecks_disagreed", 0) == before.get("rechecks_disagreed", 0)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "middle"])
async def test_a_worker_that_is_wrong_is_disagreed_with(watched: Bench, place: int) -> None:
    """Its hidden states are finite and wrong, so nothing else can notice. The comparison does, and names it among two;
    nobody is out for that, for who is right is not known."""
    name = await watched.arm(place, "step.computed=wrong@1+")
    await all_warm(watched)
    before = await watched.figures()
    known = {
        n["incarnation"]: Counter(n["disagreed_with"]) for n in await watched.nodes()
    }  # from tests before this one
    for _ in range(20):
        await watched.client.generate([5, 6, 7, 8], max_tokens=100, ignore_eos=True, temperature=0.0)
        if (await watched.figures()).get("rechecks_disagreed", 0) > before.get("rechecks_disagreed", 0):
            break
    node = await watched.node(name)
    assert node["disagreed_with"], await watched.figures()
    assert node["state"] == "member"
    others = [n for n in await watched.nodes() if n["name"] != name and n["state"] == "member"]
    assert all(set(Counter(n["disagreed_with"]) - known[n["incarnation"]]) <= {name} for n in others), others


class Meddler(threading.Thread):
    """Stands between a worker and those who send to it, and damages every twentieth message with hidden states: a bit
    of the tensor, a bit of the header, an end that is missing, in turns."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], told: str) -> None:
        super().__init__(name="meddler")
        port = int(told.rpartition(":")[2])
        self._doorman, self._passage = Doorman(context), Passage(context, port, port + ASIDE)
        self._ends = threading.Event()
        self._num_seen = 0
        self.num_damaged = 0

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._doorman.socket, self._passage.front):
            poller.register(socket, zmq.POLLIN)
        while not self._ends.is_set():
            ready = dict(poller.poll(20))
            if self._doorman.socket in ready:
                self._doorman.let_in()
            if self._passage.front in ready:
                key, frames = self._passage.receive()
                self._passage.send(key, self._handed_on(frames))
        self._passage.close()
        self._doorman.socket.close(0)

    def stop(self) -> None:
        self._ends.set()
        self.join()

    def _handed_on(self, frames: list[bytes]) -> list[bytes]:
        self._num_seen += len(frames) == 2
        if len(frames) < 2 or self._num_seen % 20:
            return frames
        header, tensor = bytearray(frames[0]), bytearray(frames[1])
        match self.num_damaged % 3:
            case 0:
                tensor[len(tensor) // 2] ^= 0x10
            case 1:
                header[len(header) // 2] ^= 0x01
            case _:
                del tensor[-4:]
        self.num_damaged += 1
        return [bytes(header), bytes(tensor)]


async def test_damage_on_the_way_is_nobodys_fault(bench: Bench) -> None:
    """Every twentieth message to a stage comes damaged, in one way or another: none is used, it costs new epochs and no
    worker, no request is blamed, and the answers are the same to the last bit."""
    name = (await bench.order())[1]
    bench.swarm.start_again(name, f"advertise=port:-{ASIDE}")
    with zmq.Context() as context:
        told: Any = None
        while not told:
            told = (await bench.node(name, bench.swarm.workers[name].pid)).get("endpoint")
            await asyncio.sleep(0.05)
        meddler = Meddler(context, told)
        meddler.start()
        try:
            await bench.serving()
            before = await bench.figures()
            await bench.right()
            after = await bench.figures()
        finally:
            meddler.stop()
    assert meddler.num_damaged >= 3
    told = after["damaged_messages"] - before.get("damaged_messages", 0)
    assert 1 <= told <= meddler.num_damaged, "what is damaged on its way into an epoch that has ended needs no word"
    assert after.get("workers_lost", 0) == before.get("workers_lost", 0)
    assert after.get("sequences_at_deaths", 0) == before.get("sequences_at_deaths", 0)
