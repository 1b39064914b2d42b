"""Several machines: who has an invitation joins in a line, who has none gets nowhere; answers are the same from all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.linux import why_no_namespaces
from tests.integration.hosts import Host, network

_WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
SOON_S = 120.0  # a worker starts in seconds, on a busy machine in a minute
PROMPT = ("generate", "Once upon a time", "--max-tokens", "24", "--temperature", "0.8", "--seed", "7", "--json")

ASKS = """
import sys
from pathlib import Path
from swarm import Client

with Client() as client:
    answers = set()
    while not Path(sys.argv[1]).exists():
        done = client.generate("Once upon a time", max_tokens=200, temperature=0.8, seed=7, ignore_eos=True)
        answers.add((done.text, tuple(done.tokens)))
        assert len(answers) == 1, answers
        print("answered", flush=True)
"""

# A way by relay is dearer, so that a plan would rather do without who is reached by no other. All workers are to be
# used: objective auto would leave some out after a quiet minute.
PINNED = {"SWARM_PLAN__PINS__SHYER": "3-4", "SWARM_PLAN__OBJECTIVE": "throughput"}


def until(holds: Callable[[], Any], what: str) -> Any:
    give_up_at = time.monotonic() + SOON_S
    while not (found := holds()):
        assert time.monotonic() < give_up_at, what
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """``a`` has a broker and a worker; ``b``, ``c`` and ``d`` have nothing yet."""
    with network(tmp_path_factory.mktemp("hosts"), "a", "b", "c", "d") as hosts:
        a = hosts["a"]
        a.start("up", "--workers", "1", "--listen", a.address, "--no-http", log=a.home / "up.log", **PINNED)
        until(lambda: state(a) == "serving", "the first host serves")
        yield hosts


def control(host: Host, *words: str) -> Any:
    done = host.ctl(*words, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {}


def state(host: Host) -> object:
    return host.report("status").get("state")


def invitation(host: Host, role: str, *more: str) -> str:
    done = host.ctl("invite", "--role", role, *more)
    assert done.returncode == 0, done.stderr
    return next(word for word in done.stdout.split() if word.startswith("swarm1:"))


def stages(host: Host) -> set[str]:
    """The workers that serve."""
    plan = host.report("plan")
    return {stage["worker"] for stage in plan.get("stages") or [] if plan["state"] == "serving"}


def text_of(host: Host, *more: str) -> str:
    done = host.run(*PROMPT, *more)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["text"])


def log_of(host: Host, name: str) -> str:
    return (host.home / name).read_text(errors="replace")


def test_a_worker_and_a_client_join_by_invitation(hosts: dict[str, Host]) -> None:
    """Each in one line; later without it; and the answer is the same from everywhere."""
    a, b, c = hosts["a"], hosts["b"], hosts["c"]
    expected = text_of(a)
    b.start("worker", "--join", invitation(a, "worker"), "--name", "far", log=b.home / "worker.log")
    until(lambda: "far" in stages(a), "the far worker serves")
    assert text_of(c, "--join", invitation(a, "client")) == expected
    assert text_of(c) == expected  # it is known there now


def test_who_has_no_key_gets_nowhere(hosts: dict[str, Host]) -> None:
    """Nor who has an invitation that was used, or one for something else."""
    a, d = hosts["a"], hosts["d"]
    done = d.run(*PROMPT, "--url", f"tcp://{a.address}:5700")
    assert done.returncode != 0
    assert "--join" in done.stderr
    used = invitation(a, "client", "--uses", "1")
    assert text_of(d, "--join", used)
    other = Host("other", d.namespace, d.address, Path(d.home) / "other")
    other.home.mkdir()
    done = other.run(*PROMPT, "--join", used)
    assert done.returncode != 0
    assert "has been used" in done.stderr
    done = other.run("worker", "--join", invitation(a, "client"))
    assert done.returncode == 78
    assert "for a client" in done.stderr


def test_a_client_governs_nobody(hosts: dict[str, Host]) -> None:
    """It may look; it can't stop a worker, start some, invite or revoke."""
    a, c = hosts["a"], hosts["c"]
    text_of(c, "--join", invitation(a, "client"))
    assert c.ctl("nodes").returncode == 0
    for words in (("stop", "w0"), ("join",), ("invite", "--role", "admin"), ("keys", "revoke", "far")):
        done = c.ctl(*words)
        assert done.returncode != 0, words
        assert "admin" in done.stderr, (words, done.stderr)


def test_who_is_revoked_is_out_at_once(hosts: dict[str, Host]) -> None:
    """Its process ends, and does not come back; others go on."""
    a, b = hosts["a"], hosts["b"]
    process = b.start("worker", "--join", invitation(a, "worker"), "--name", "gone", log=b.home / "gone.log")
    until(lambda: "gone" in stages(a), "it serves")
    assert a.ctl("keys", "revoke", "gone").returncode == 0
    assert process.wait(SOON_S) == 78
    assert "revoked" in log_of(b, "gone.log")
    until(lambda: stages(a) and "gone" not in stages(a), "the others serve")
    assert text_of(a)


def test_keys_are_changed_while_answers_run(hosts: dict[str, Host]) -> None:
    """A worker's and a client's, each by a command on its own machine: both processes go on, the answer is the same,
    and the old keys open nothing."""
    a, b, c = hosts["a"], hosts["b"], hosts["c"]
    if "far" not in stages(a):
        b.start("worker", "--join", invitation(a, "worker"), "--name", "far", log=b.home / "far.log")
        until(lambda: "far" in stages(a), "the far worker serves")
    text_of(c, "--join", invitation(a, "client"))
    before = {row["name"]: row["key"] for row in a.report("keys")["members"]}
    stop, log = c.home / "stop", c.home / "asks.log"
    asks = c.start_python("-c", ASKS, str(stop), log=log)
    until(lambda: log_of(c, "asks.log").count("answered") >= 2, "answers run")
    for host, names in ((b, ["far"]), (c, [])):
        done = host.ctl("keys", "rotate", "--machine", *names, "--json")
        assert done.returncode == 0, done.stderr
        name = json.loads(done.stdout)["rotated"]
        (row,) = (row for row in a.report("keys")["members"] if row["name"] == name)
        assert (row["key"], row["is_rotating"]) == (json.loads(done.stdout)["key"][:16], False)
        assert row["key"] != before[name]
        assert asks.poll() is None, log_of(c, "asks.log")
    until(lambda: "far" in stages(a), "the same process serves with its new key")
    answered = log_of(c, "asks.log").count("answered")
    until(lambda: log_of(c, "asks.log").count("answered") >= answered + 2, "answers run")
    stop.touch()
    assert asks.wait(SOON_S) == 0, log_of(c, "asks.log")
    assert text_of(c) == text_of(a)


def kill_broker(host: Host) -> None:
    """With SIGKILL; who started it starts another."""
    (broker,) = (
        each
        for each in psutil.Process(host.started[0].pid).children(recursive=True)
        if "broker" in each.cmdline()[-20:] and each.status() != psutil.STATUS_ZOMBIE
    )
    broker.kill()
    until(lambda: not broker.is_running() or broker.status() == psutil.STATUS_ZOMBIE, "it is dead")


def test_the_brokers_key_is_changed_while_answers_run(hosts: dict[str, Host]) -> None:
    """A worker and a client go on over the connections that stand, and no answer is lost, though the broker is killed
    on the way and again at the end; who is off is waited for, and named when it is shut out; who was invited before
    gets in by the old key, and knows the new one then."""
    a, b, c, d = hosts["a"], hosts["b"], hosts["c"], hosts["d"]
    if "far" not in stages(a):
        b.start("worker", "--join", invitation(a, "worker"), "--name", "far", log=b.home / "far.log")
        until(lambda: "far" in stages(a), "the far worker serves")
    text_of(c, "--join", invitation(a, "client", "--name", "asks"))
    text_of(d, "--join", invitation(a, "client", "--name", "off"))
    before = invitation(a, "client", "--name", "late")
    stop, log = c.home / "stop", c.home / "asks.log"
    log.unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    asks = c.start_python("-c", ASKS, str(stop), log=log)
    until(lambda: log_of(c, "asks.log").count("answered") >= 2, "answers run")
    old, began = control(a, "keys", "show")["key"], a.report("plan")["epoch"]
    begun = control(a, "keys", "rotate", "--broker")
    assert begun["key"] != old
    assert not begun["is_over"]

    def behind() -> set[str]:
        """Of those that are meant here; others came and went in other tests."""
        rows = a.report("keys").get("members", [])
        return {row["name"] for row in rows if not row["knows_broker"]} & {"far", "asks", "off", "late"}

    until(lambda: behind() == {"off"}, "who is there has kept it")
    assert a.report("plan")["epoch"] == began  # nobody was hung up on
    kill_broker(a)
    until(lambda: "far" in stages(a), "it serves again")
    assert behind() == {"off"}
    other = Host("late", d.namespace, d.address, Path(d.home) / "late")
    other.home.mkdir()
    assert text_of(other, "--join", before) == text_of(other)
    assert "off (client)" in control(a, "keys", "rotate", "--broker")["behind"]
    over = control(a, "keys", "rotate", "--broker", "--now")
    assert (over["is_over"], over["key"]) == (True, begun["key"])
    assert {"far (worker)", "asks (client)", "off (client)", "late (client)"} & set(over["shut_out"]) == {
        "off (client)"
    }
    done = d.run(*PROMPT)
    assert done.returncode != 0
    assert "if its key has changed" in done.stderr
    assert text_of(other)
    kill_broker(a)
    until(lambda: "far" in stages(a), "the same process knows the new key")
    answered = log_of(c, "asks.log").count("answered")
    until(lambda: log_of(c, "asks.log").count("answered") >= answered + 2, "answers run")
    stop.touch()
    assert asks.wait(SOON_S) == 0, log_of(c, "asks.log")


def test_who_governs_has_others_change_their_keys(hosts: dict[str, Host]) -> None:
    """A worker's process does it at once, a client's machine when it is there again."""
    a, b, c = hosts["a"], hosts["b"], hosts["c"]
    if "far" not in stages(a):
        b.start("worker", "--join", invitation(a, "worker"), "--name", "far", log=b.home / "far.log")
        until(lambda: "far" in stages(a), "the far worker serves")
    text_of(c, "--join", invitation(a, "client", "--name", "called"))

    def row_of(name: str) -> Any:
        return next(row for row in a.report("keys")["members"] if row["name"] == name)

    for name in ("far", "called"):
        former = row_of(name)["key"]
        assert control(a, "keys", "rotate", name)["rotated"] == name
        if name == "called":
            assert row_of(name)["is_rotating"]
            text_of(c)
        until(lambda name=name, former=former: row_of(name)["key"] != former, f"{name} has another key")  # type: ignore[misc]
        until(lambda name=name: not row_of(name)["is_rotating"], "the old one is refused")  # type: ignore[misc]
    until(lambda: "far" in stages(a), "the same process serves with its new key")
    assert text_of(c) == text_of(a)


def test_a_host_that_vanishes_and_returns(hosts: dict[str, Host]) -> None:
    """Its layers are computed elsewhere meanwhile; it is a member again afterwards."""
    a, b = hosts["a"], hosts["b"]
    expected = text_of(a)
    if "far" not in stages(a):
        b.start("worker", "--join", invitation(a, "worker"), "--name", "far", log=b.home / "far.log")
        until(lambda: "far" in stages(a), "the far worker serves")
    b.vanish()
    try:
        until(lambda: stages(a) and "far" not in stages(a), "the others have its layers")
        assert text_of(a) == expected
    finally:
        b.return_()
    until(lambda: "far" in stages(a), "it is back")
    assert text_of(a) == expected


def test_only_who_wishes_it_is_found(hosts: dict[str, Host]) -> None:
    """By multicast, on the network that the machines share; with its key, which says whether it is known."""
    pytest.importorskip("zeroconf", reason="no zeroconf (swarm-llm[discover])")
    c, d = hosts["c"], hosts["d"]
    other = c.start("broker", "--listen", c.address, "--port", "5800", "--discoverable", log=c.home / "other.log")
    address = f"tcp://{c.address}:5800"

    def found() -> Any:
        done = d.run("discover", "--json", "--seconds", "1")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["found"]

    (row,) = until(found, "it is found, and nobody else")
    assert (row["addresses"], row["joined_as"]) == ([address], [])
    assert row["key"] == json.loads(c.ctl("--url", "tcp://127.0.0.1:5800", "keys", "show", "--json").stdout)["key"][:16]
    assert "get an invitation there" in d.run("discover", "--seconds", "1").stdout
    other.terminate()
    other.wait(SOON_S)
    assert found() == []


def order_of(host: Host) -> list[str]:
    """The workers that serve, first stage first."""
    plan = host.report("plan")
    return [str(stage["worker"]) for stage in plan.get("stages") or []] if plan.get("state") == "serving" else []


def test_a_way_that_is_shut_is_gone_around(hosts: dict[str, Host]) -> None:
    """A firewall lets nothing in from one of them: found out before a plan counts on it, and told; the stages are in an
    order that does without. When it lets in nothing at all, steps go by relay, and the answer is the same."""
    a, b, d = hosts["a"], hosts["b"], hosts["d"]
    expected = text_of(a)
    if "far" not in stages(a):
        b.start("worker", "--join", invitation(a, "worker"), "--name", "far", log=b.home / "far.log")
        until(lambda: "far" in stages(a), "the far worker serves")
    d.rules(f"input: ip saddr {b.address} tcp dport 20000-29999 drop")
    d.start("worker", "--join", invitation(a, "worker"), "--name", "shy", log=d.home / "shy.log")
    until(lambda: {"shy", "far"} <= set(order_of(a)), "both serve")
    order = order_of(a)
    assert (*order, "")[order.index("far") + 1] != "shy"
    assert text_of(a) == expected
    d.rules("input: tcp dport 20000-29999 drop")
    assert a.ctl("stop", "shy", "--force").returncode == 0
    d.start("worker", "--join", invitation(a, "worker"), "--name", "shyer", log=d.home / "shyer.log")
    found_out = "except through the relay: nothing answers at"
    until(lambda: found_out in str(a.report("nodes")), "it is found out")
    assert found_out in a.ctl("nodes").stdout
    by_relay = "shyer is reached only through the broker's relay"
    until(lambda: by_relay in str(a.report("plan")), "it has its part all the same")
    assert by_relay in a.ctl("plan").stdout
    assert text_of(a) == expected
    d.rules()
