"""Run by a real systemd: units as they are installed, hardened, killed, stopped, frozen, told to read their settings
again, and taken away; requests under way go on through all of it."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.booted import PROGRAMS, SOON_S, Booted, NoSystem, booted, why_not

_WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""), pytest.mark.timeout(600)]
UNITS = ("swarm-broker", "swarm-gateway", "swarm-worker@w0", "swarm-worker@w1")
ASKS = """
from swarm import Client
with Client(reconnect_timeout_s=60.0) as client:
    answer = client.generate("Once upon a time", max_tokens=400, ignore_eos=True, temperature=1.0, seed=7, timeout=90)
    print(answer.text)
"""
MEMORY = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
OTHERS = "10.88.0.1"  # an address that other machines could reach
USER = "ann"
NEWER = "0.999.0"
# Sooner than as shipped, so that a test need not wait for a minute. A worker's compute thread stands still for ever
# once a file is there.
IMPATIENT = "[Service]\nWatchdogSec=4\n"
HANGS = "Environment=SWARM_FAILPOINTS=step.computes=hang SWARM_FAILPOINTS_FROM=/run/swarm/hang-%%i\n"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with ExitStack() as stack:
        try:
            system = stack.enter_context(booted(tmp_path_factory.mktemp("booted")))
        except NoSystem as error:
            pytest.skip(f"no system can be booted here: {error}")
        done = system.run(str(PROGRAMS / "swarm"), "systemd", "install", "--memory-limit", "1GiB")
        assert done.returncode == 0, done.stderr
        for unit in ("swarm-broker.service", "swarm-worker@.service"):
            path = f"/etc/systemd/system/{unit}.d/90-impatient.conf"
            text = IMPATIENT + (HANGS if "worker" in unit else "")
            system.run("sh", "-c", f"mkdir -p {path.rpartition('/')[0]}; printf '{text}' > {path}")
        system.systemctl("daemon-reload")
        system.systemctl("enable", "--now", "swarm.target", *UNITS)
        yield system


@pytest.fixture
def serving(system: Booted) -> Booted:
    """Both workers have their parts."""
    system.until(lambda: _stages(system) == 2, "both workers serve")
    return system


def _stages(system: Booted) -> int:
    said = system.swarmctl("status", "--json")
    status = json.loads(said) if said else {"state": "gone"}
    return int(status["num_stages"]) if status["state"] == "serving" else 0


def _layers(system: Booted) -> dict[str, object]:
    rows = json.loads(system.swarmctl("nodes", "--json"))["workers"]
    return {row["name"]: row["layers"] for row in rows if row["layers"]}


def _generate(system: Booted) -> subprocess.Popen[str]:
    return system.start(str(PROGRAMS / "python"), "-c", ASKS)


def _pid(system: Booted, unit: str) -> int:
    return int(system.shown(unit, "MainPID"))


@contextmanager
def under_way(system: Booted, expected: str) -> Iterator[None]:
    """A request is under way while something is done, and ends as if nothing had been."""
    before = json.loads(system.swarmctl("status", "--json"))["tokens_total"]
    asks = _generate(system)
    try:
        system.until(
            lambda: json.loads(system.swarmctl("status", "--json"))["tokens_total"] > before + 10, "tokens come"
        )
        yield
        said, complaint = asks.communicate(timeout=SOON_S)
    finally:
        asks.kill()
        asks.wait()
    assert asks.returncode == 0, complaint
    assert said == expected


@pytest.fixture(scope="module")
def expected(system: Booted) -> str:
    system.until(lambda: _stages(system) == 2, "both workers serve")
    said, complaint = _generate(system).communicate(timeout=SOON_S)
    assert said, complaint
    return said


def test_all_of_it_serves_and_says_so(serving: Booted) -> None:
    for unit in UNITS:
        assert serving.shown(unit, "ActiveState") == "active"
    serving.until(lambda: "serving village on 2 stages" in serving.shown("swarm-broker", "StatusText"), "it says so")
    serving.until(lambda: serving.shown("swarm-worker@w0", "StatusText").startswith("layers "), "which layers")
    assert serving.shown("swarm-gateway", "StatusText") == "serving http://127.0.0.1:8000"
    shown = serving.run(str(PROGRAMS / "swarm"), "systemd", "status").stdout
    assert "serving village on 2 stages" in shown
    assert serving.run("curl", "-sf", "http://127.0.0.1:8000/v1/models").returncode == 0
    for unit in UNITS:
        assert serving.shown(unit, "StartLimitIntervalUSec") == "0"  # however often it dies, it is started again
        assert serving.shown(unit, "User") == "swarm"
    assert int(serving.shown("swarm-worker@w0", "MemoryMax")) == (1 << 30) + (512 << 20)


def test_events_are_in_the_journal_by_their_fields(serving: Booted) -> None:
    line = serving.journal("-u", "swarm-broker", "SWARM_EVENT=plan_serving", "-o", "json", "-n", "1")
    event = json.loads(line)
    assert event["PRIORITY"] == "6"
    assert int(event["SWARM_EPOCH"]) >= 1
    assert event["SWARM_CAUSE"]
    assert event["MESSAGE"].startswith("plan_serving ")


@pytest.mark.parametrize("unit", ["swarm-worker@w1", "swarm-broker"])
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_who_dies_or_gives_no_sign_is_started_again_and_answers_go_on(
    serving: Booted, expected: str, unit: str, signal: str
) -> None:
    """Who is stopped gives no sign, and the watchdog ends it."""
    before = _pid(serving, unit)
    with under_way(serving, expected):
        serving.systemctl("kill", "--kill-who=main", f"--signal={signal}", unit)
        serving.until(lambda: _pid(serving, unit) not in (0, before), "another process is there")
    serving.until(lambda: serving.shown(unit, "ActiveState") == "active", "it is ready")


def test_a_worker_that_hangs_is_ended_and_started_again(serving: Booted, expected: str) -> None:
    """Its loop goes on, its compute thread does not: the broker goes on without it, and systemd ends it."""
    before = _pid(serving, "swarm-worker@w1")
    with under_way(serving, expected):
        serving.run("touch", "/run/swarm/hang-w1")
        serving.until(lambda: _pid(serving, "swarm-worker@w1") not in (0, before), "another process is there")
        serving.run("rm", "/run/swarm/hang-w1")
    assert serving.journal("-u", "swarm-worker@w1", "--grep", "Watchdog timeout")


@pytest.mark.skipif(not MEMORY.exists(), reason=f"no {MEMORY}, by which a test could limit a process's memory")
def test_a_worker_at_the_end_of_its_memory_is_started_again(serving: Booted, expected: str) -> None:
    """The kernel ends it at the next page that it wants. (In there, systemd has no say about memory: so the limit is
    set from outside, and takes effect as MemoryMax does.)"""
    before = _pid(serving, "swarm-worker@w1")
    with under_way(serving, expected), _limited(serving.outside(before)):
        serving.until(lambda: _pid(serving, "swarm-worker@w1") not in (0, before), "another process is there")
    serving.until(lambda: serving.shown("swarm-worker@w1", "ActiveState") == "active", "it is ready")
    assert serving.journal("-u", "swarm-worker@w1", "--grep", "status=9/KILL")


@contextmanager
def _limited(pid: int) -> Iterator[None]:
    """No more memory for this process, from now on."""
    group = MEMORY.parent / f"swarm-test-{pid}"
    group.mkdir()
    try:
        (group / MEMORY.name).write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        group.rmdir()


def test_a_newer_package_is_taken_over_while_it_serves(serving: Booted, expected: str) -> None:
    """As docs/operations.md tells it: install, workers one after the other, then broker and gateway."""
    before = [_pid(serving, unit) for unit in UNITS]
    with under_way(serving, expected):
        _install_newer(serving)
        done = serving.run(str(PROGRAMS / "swarm"), "systemd", "install", "--memory-limit", "1GiB")
        assert done.returncode == 0, done.stderr
        done = serving.run(str(PROGRAMS / "swarmctl"), "upgrade", "--rolling", "--yes")
        assert done.returncode == 0, done.stderr
        assert {row["version"] for row in _versions(serving) if row["process"] != "broker"} == {NEWER}
        serving.systemctl("restart", "swarm-broker", "swarm-gateway")
    assert {row["version"] for row in _versions(serving)} == {NEWER}
    assert not {_pid(serving, unit) for unit in UNITS} & {*before, 0}


def _install_newer(system: Booted) -> None:
    """The same, with the next version's number, where Python looks first."""
    place = "import pathlib, swarm.version; print(pathlib.Path(swarm.version.__file__).parent)"
    swarm = system.run(str(PROGRAMS / "python"), "-c", place).stdout.strip()
    path = next((system.root / PROGRAMS.parent.relative_to("/") / "lib").glob("python*/site-packages/checkout.pth"))
    done = system.run("sh", "-c", f"mkdir /opt/newer && cp -r {swarm} /opt/newer/swarm && chmod -R a+rX /opt/newer")
    assert done.returncode == 0, done.stderr
    done = system.run(
        "sh", "-c", f"sed -i 's/^__version__ = .*/__version__ = \"{NEWER}\"/' /opt/newer/swarm/version.py"
    )
    assert done.returncode == 0, done.stderr
    path.write_text("/opt/newer\n" + path.read_text())


def _versions(system: Booted) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(system.swarmctl("version", "--json"))["processes"]
    return rows


def test_who_dies_again_and_again_is_never_parked(serving: Booted, expected: str) -> None:
    """A crash loop: the others serve meanwhile, and it is back as soon as it lives."""
    before = int(serving.shown("swarm-worker@w1", "NRestarts"))
    with under_way(serving, expected):
        for _ in range(7):  # more than systemd's own limit
            pid = serving.until(lambda: _pid(serving, "swarm-worker@w1"), "it is started again")
            serving.run("kill", "-KILL", str(pid))
            serving.until(lambda pid=pid: _pid(serving, "swarm-worker@w1") != pid, "it is dead")
    serving.until(lambda: _stages(serving) == 2, "both workers serve again")
    assert int(serving.shown("swarm-worker@w1", "NRestarts")) >= before + 7


def test_a_gateway_that_is_killed_serves_again(serving: Booted) -> None:
    before = _pid(serving, "swarm-gateway")
    serving.systemctl("kill", "--kill-who=main", "--signal=KILL", "swarm-gateway")
    serving.until(lambda: _pid(serving, "swarm-gateway") not in (0, before), "another process is there")
    serving.until(lambda: serving.run("curl", "-sf", "http://127.0.0.1:8000/v1/models").returncode == 0, "it serves")


def test_stopping_a_worker_drains_it(serving: Booted, expected: str) -> None:
    with under_way(serving, expected):
        serving.systemctl("stop", "swarm-worker@w1")
    assert serving.shown("swarm-worker@w1", "Result") == "success"
    assert serving.shown("swarm-worker@w1", "ActiveState") == "inactive"
    assert "worker_asked_to_end" in serving.journal("-u", "swarm-worker@w1", "-n", "20")
    serving.systemctl("start", "swarm-worker@w1")


@contextmanager
def nobody_refused(system: Booted, *doors: tuple[str, int]) -> Iterator[None]:
    """Whoever knocks at one of these doors while something is done is let in or waits."""
    refused: list[str] = []
    over = threading.Event()
    knocks = "; ".join(f"exec 3<>/dev/tcp/{host}/{port}" for host, port in doors)

    def knock() -> None:
        while not over.wait(0.05):
            said = system.run("bash", "-c", knocks).stderr
            refused.extend([said] if said else [])

    knocker = threading.Thread(target=knock)
    knocker.start()
    try:
        yield
    finally:
        over.set()
        knocker.join()
    assert not refused


def test_a_restart_refuses_nobody(serving: Booted) -> None:
    """The door is systemd's: who knocks meanwhile waits."""
    with nobody_refused(serving, ("127.0.0.1", 5700), ("127.0.0.1", 5701)):
        serving.systemctl("restart", "swarm-broker")
    serving.until(lambda: _stages(serving) == 2, "both workers serve again")


def test_settings_are_read_again(serving: Booted) -> None:
    settings = "/etc/swarm/swarm.toml"
    serving.run("sh", "-c", f"printf '[log]\\nlevel = \"warning\"\\n[broker]\\nmax_queue = 7\\n' > {settings}")
    before = _pid(serving, "swarm-broker")
    serving.systemctl("reload", "swarm-broker")
    serving.run("sh", "-c", f"printf 'nonsense = 1\\n' > {settings}")
    serving.systemctl("reload", "swarm-broker")
    said = serving.until(
        lambda: serving.journal("-u", "swarm-broker", "SWARM_EVENT=settings_refused"), "what is wrong is told"
    )
    assert "nonsense" in said
    serving.run("sh", "-c", f": > {settings}")
    serving.systemctl("reload", "swarm-broker")
    told = serving.until(
        lambda: serving.journal("-u", "swarm-broker", "SWARM_EVENT=settings_reloaded"), "and what changed"
    )
    assert "log.level" in told
    assert _pid(serving, "swarm-broker") == before
    assert serving.shown("swarm-broker", "ActiveState") == "active"


def test_plans_obey_what_was_read_again(serving: Booted, expected: str) -> None:
    """Layers move, the broker's process stays, and so does the answer that is under way."""
    settings, before = "/etc/swarm/swarm.toml", _pid(serving, "swarm-broker")
    with under_way(serving, expected):
        serving.run("sh", "-c", f"printf '[plan]\\npins = {{ w1 = \"0\" }}\\n' > {settings}")
        serving.systemctl("reload", "swarm-broker")
        serving.until(lambda: _layers(serving) == {"w1": [0, 1], "w0": [1, 8]}, "w1 has what it was given")
        serving.run("sh", "-c", f": > {settings}")
        serving.systemctl("reload", "swarm-broker")
    assert _pid(serving, "swarm-broker") == before


def test_what_is_accepted_outlives_a_stop_of_all(serving: Booted) -> None:
    words = ("generate", "--detach", "Once upon a time", "--max-tokens", "60")
    request = serving.run(str(PROGRAMS / "swarm"), *words).stdout.split()[0]
    serving.systemctl("stop", "swarm.target")
    serving.until(lambda: serving.shown("swarm-broker", "ActiveState") == "inactive", "all have stopped")
    serving.systemctl("start", "swarm.target", *UNITS)
    done = serving.run(str(PROGRAMS / "swarm"), "attach", request)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_restart_refuses_nobody_from_other_machines(serving: Booted) -> None:
    """Doors that the settings have and the units as they are shipped do not."""
    serving.run("ip", "address", "add", f"{OTHERS}/32", "dev", "lo")
    serving.run("sh", "-c", f"printf '[broker]\\nlisten = [\"{OTHERS}\"]\\n' > /etc/swarm/swarm.toml")
    done = serving.run(str(PROGRAMS / "swarm"), "systemd", "install", "--memory-limit", "1GiB")
    assert done.returncode == 0, done.stderr
    serving.systemctl("stop", "swarm-broker.socket", "swarm-broker")
    serving.systemctl("start", "swarm-broker")
    with nobody_refused(serving, *((OTHERS, port) for port in range(5700, 5705))):
        serving.systemctl("restart", "swarm-broker")
    assert not serving.journal("-b", "SWARM_EVENT=handed_doors_unused")
    serving.until(lambda: _stages(serving) == 2, "both workers serve again")


def test_uninstalling_leaves_nothing(system: Booted) -> None:
    """The last one but that of another user."""
    done = system.run(str(PROGRAMS / "swarm"), "systemd", "uninstall", "--purge")
    assert done.returncode == 0, done.stderr
    listed = ("systemctl", "list-units", "--all", "--plain", "--no-legend", "swarm*")
    # systemd forgets the names of units that are gone a moment later.
    system.until(lambda: "swarm" not in system.run(*listed).stdout, "no unit of Swarm's is known")
    left = system.run("find", "/etc", "/var/lib", "/var/cache", "/run/swarm", "-name", "*swarm*").stdout.split()
    assert [path for path in left if "90-impatient" not in path and not path.endswith(".d")] == []
    assert system.run("id", "swarm").returncode != 0


def test_one_user_has_a_swarm_without_root(system: Booted) -> None:
    """By that user's own systemd: it serves, is told to read its settings again, and goes without a trace."""
    system.run("useradd", "--create-home", USER)
    number = system.run("id", "-u", USER).stdout.strip()
    system.systemctl("start", f"user@{number}")
    as_user = ("runuser", "-u", USER, "--", "env", f"XDG_RUNTIME_DIR=/run/user/{number}", f"HOME=/home/{USER}")

    def run(*words: str) -> str:
        done = system.run(*as_user, *words)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{system.journal('-n', '60')}"
        return done.stdout

    swarm = str(PROGRAMS / "swarm")
    run(swarm, "systemd", "install", "--user", "--memory-limit", "1GiB")
    run("systemctl", "--user", "enable", "--now", "swarm.target", "swarm-broker", "swarm-worker@w0")
    system.until(lambda: _stages(system) == 1, "it serves")
    shown = run(swarm, "systemd", "status", "--user")
    assert "serving village on 1 stage" in shown
    before = run("systemctl", "--user", "show", "--value", "--property", "MainPID", "swarm-broker")
    run("systemctl", "--user", "reload", "swarm-broker")
    assert run("systemctl", "--user", "show", "--value", "--property", "MainPID", "swarm-broker") == before
    run(swarm, "systemd", "uninstall", "--user", "--purge")
    assert run("find", f"/home/{USER}", "-name", "*swarm*") == ""
