"""Members that mean harm. A worker is revoked and does not go: it hears nothing more, nobody hears it, and answers stay
right. A client floods its door. And while a crowd knocks, the broker's key is changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults import hostile
from tests.faults.linux import why_no_namespaces
from tests.integration.hosts import Host, network
from tests.integration.test_hosts import control, invitation, log_of, stages, state, text_of, until

_WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
OUT_S = 2.0  # after which a key that was revoked must be out everywhere
ATTACK_S = 3.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """``a`` has a broker and a worker, ``c`` another one; ``b`` has the one that is taken over, and ``d`` the crowd."""
    with network(tmp_path_factory.mktemp("hosts"), "a", "b", "c", "d") as hosts:
        a, c = hosts["a"], hosts["c"]
        a.start("up", "--workers", "1", "--listen", a.address, "--no-http", log=a.home / "up.log")
        until(lambda: state(a) == "serving", "the first host serves")
        c.start("worker", "--join", invitation(a, "worker"), "--name", "near", log=c.home / "near.log")
        until(lambda: "near" in stages(a), "the near worker serves")
        yield hosts


def notes_of(path: Path) -> list[tuple[float, str]]:
    lines = (line.split(" ", 1) for line in path.read_text().splitlines() if " " in line)
    return [(float(at), what) for at, what in lines]


def test_who_is_revoked_and_does_not_go_is_shut_out_everywhere(hosts: dict[str, Host]) -> None:
    a, b = hosts["a"], hosts["b"]
    expected = text_of(a)
    notes = b.home / "notes"
    words = ("worker", "--join", invitation(a, "worker"), "--name", "far")
    taken = b.start_python(
        "-m", "tests.faults.hostile", *words, log=b.home / "far.log", **{hostile.VARIABLE: str(notes)}
    )
    until(lambda: "far" in stages(a), "it serves")
    assert text_of(a) == expected
    assert any(what == "heard-a-step" for _, what in notes_of(notes))
    assert a.ctl("keys", "revoke", "far").returncode == 0
    revoked_at = time.time()
    until(lambda: stages(a) and "far" not in stages(a), "the others serve")
    while time.time() < revoked_at + OUT_S + ATTACK_S:
        assert text_of(a) == expected
    assert taken.poll() is None, log_of(b, "far.log")
    later = [what for at, what in notes_of(notes) if at > revoked_at + OUT_S]
    assert set(later) <= {"turned-away"} | {what for what in later if what.startswith("should-end")}
    assert "turned-away" in later, "it did knock"
    assert stages(a) == {"near", *(name for name in stages(a) if name.startswith("w"))}
    for host in (a, hosts["c"]):
        for log in host.home.rglob("*.log"):
            assert "Traceback" not in log.read_text(errors="replace"), log
    taken.kill()
    assert text_of(a) == expected


# A client, over a hundred connections: each begins a message of 8 MiB and sends half of it, then says what nobody can
# understand, as fast as it is read, and reads no answer.
FLOOD = """
import asyncio, sys
from pathlib import Path
from swarm.auth.memberships import find
from swarm.wire.codec import CLIENT
from swarm.wire.transport.server_handshake import encode_metadata
from swarm.wire.transport.zmtp import command_frame, frame_header
from tests.integration.crowd import CURVE, Line
from tests.unit.wire.test_curve import Knocker

async def one(known, host, over, number):
    while not over.exists():
        _, line = await asyncio.get_running_loop().create_connection(Line, host, 5700)
        try:
            knocker = Knocker(known.pair, known.broker, encode_metadata(Socket_Type=b"DEALER"))
            line.write(CURVE + command_frame(knocker.hello()))
            initiate = knocker.initiate((await line.read(234))[66:234])
            line.write(bytes([6]) + len(initiate).to_bytes(8, "big") + initiate)
            while not over.exists() and not line.ended.done():
                if number % 2:
                    limit = CLIENT.frame_limit_bytes
                    line.write(frame_header(limit, more=False) + bytes(limit // 2))
                    await asyncio.sleep(2.0)
                for _ in range(100):
                    sealed = knocker.message(b"nonsense" * 1000)
                    line.write(frame_header(len(sealed), more=False) + sealed)
                await asyncio.sleep(0.05)
        except EOFError:
            pass
        finally:
            if not line.ended.done():  # a transport that has ended can't be aborted
                line.transport.abort()

async def main(host, state, over):
    known = find(Path(state))
    print("floods", flush=True)
    await asyncio.gather(*(one(known, host, Path(over), number) for number in range(100)))

asyncio.run(main(*sys.argv[1:]))
"""
FLOOD_S = 8.0
MOST_MORE = 300 << 20  # of the broker's memory: two bounds of 64 MiB, and what the allocator keeps


def test_a_client_that_floods_delays_nobody_for_long(hosts: dict[str, Host]) -> None:
    """It may take a tenth of the broker's time, and bounded memory, over however many connections."""
    a, d = hosts["a"], hosts["d"]
    expected = text_of(a)
    text_of(d, "--join", invitation(a, "client", "--name", "floods"))
    processes = psutil.Process(a.started[0].pid).children(recursive=True)
    (broker,) = (each for each in processes if "broker" in each.cmdline()[-20:])
    before, over = broker.memory_info().rss, d.home / "over-flood"
    state_dir = str(d.home / "state" / "swarm")
    flood = d.start_python("-c", FLOOD, a.address, state_dir, str(over), log=d.home / "flood.log")
    try:
        until(lambda: "floods" in log_of(d, "flood.log"), "it floods")
        give_up_at, most = time.monotonic() + FLOOD_S, 0
        while time.monotonic() < give_up_at:
            assert text_of(a) == expected
            most = max(most, broker.memory_info().rss)
        assert flood.poll() is None, log_of(d, "flood.log")
    finally:
        over.touch()
    assert most - before < MOST_MORE
    assert flood.wait(60) == 0, log_of(d, "flood.log")
    log = log_of(a, "state/swarm/logs/broker.log")
    assert "message_refused" in log, "what it said was heard"
    assert "Traceback" not in log


# Knocks at the doors for clients and workers, from one address and in a few bad ways at once, until a file appears.
CROWD = """
import asyncio, sys
from pathlib import Path
from tests.integration.crowd import Crowd, Door

async def main(host, public, over):
    while not Path(over).exists():
        doors = [Door("client", host, 5700, public), Door("control", host, 5701, public)]
        kinds = ("silent", "wrong-key", "garbage", "noise", "oversized")
        await asyncio.gather(*(Crowd(door, kind).knock(20, 0.3) for door in doors for kind in kinds))
        print("came", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_the_brokers_key_is_changed_while_a_crowd_knocks(hosts: dict[str, Host]) -> None:
    """Who is in hears of it over the connection that stands, and who comes later gets in through the crowd."""
    a, c, d = hosts["a"], hosts["c"], hosts["d"]
    expected = text_of(a)
    old, over, log = control(a, "keys", "show")["key"], d.home / "over", d.home / "crowd.log"
    crowd = d.start_python("-c", CROWD, a.address, old, str(over), log=log)
    try:
        until(lambda: "came" in log_of(d, "crowd.log"), "the crowd knocks")
        new = control(a, "keys", "rotate", "--broker")["key"]
        assert new != old

        def knows() -> bool:
            rows = a.report("keys")["members"]
            return all(row["knows_broker"] for row in rows if row["name"] == "near")

        until(knows, "the worker has kept it")
        assert control(a, "keys", "show")["key"] == new
        control(a, "keys", "rotate", "--broker", "--now")  # fails if nobody was behind: then it is over already
        assert text_of(a) == expected
        assert text_of(c, "--join", invitation(a, "client", "--name", "later"), "--timeout", "30") == expected
        assert "near" in stages(a)
        assert crowd.poll() is None, log_of(d, "crowd.log")
    finally:
        over.touch()
    assert crowd.wait(60) == 0
    assert "Traceback" not in log_of(c, "near.log")
