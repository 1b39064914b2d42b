"""Run by a real systemd: units as they are installed, hardened, killed, stopped, frozen, told to read their settings
again, and taken away; requests under way go on through all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from swarm.auth import invitation
from swarm.cli.doctor.checks import MANY_RESTARTS
from swarm.wire.transport.keys import public_of
from tests.integration.booted import PROGRAMS, SOON_S, NoSystem, booted, environment, why_not
from tests.integration.booted_swarm import (
    ASKS,
    MEMORY,
    NEWER,
    READS,
    SUBMITS,
    UNITS,
    BootedSwarm,
    generate,
    install_newer,
    is_open,
    limited,
    nobody_refused,
    under_way,
    versions,
)
from tests.integration.reports import Reporter

_WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""), pytest.mark.timeout(600)]
OTHERS = "10.88.0.1"  # an address that other machines could reach
USER = "ann"
SOCKET = "swarm-broker.socket"
ALL = ("swarm.target", SOCKET, *UNITS)
# The user that each unit runs as.
USERS = {
    "swarm-broker": "swarm-broker",
    "swarm-gateway": "swarm-gateway",
    "swarm-worker@w0": "swarm",
    "swarm-worker@w1": "swarm",
}
AS_WORKER, AS_GATEWAY = (("runuser", "-u", USERS[unit], "--") for unit in ("swarm-worker@w0", "swarm-gateway"))
HANG_AT = "/run/hang"  # where every unit can see a test's files
# Sooner than as shipped, so that a test need not wait for a minute.
IMPATIENT = "[Service]\nWatchdogSec=4\n"
# Where each stands still for ever once a file is there: in its loop; a worker in its compute thread.
HANGS = {
    "swarm-broker.service": "broker.tick",
    "swarm-gateway.service": "gateway.turn",
    "swarm-worker@.service": "step.computes",
}
# A hub that knows nobody, and says what it was shown.
HUB = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        if "somebody/mine" in self.path:
            print(self.headers["authorization"], flush=True)
        self.send_error(404)
    do_HEAD = do_GET
HTTPServer(("127.0.0.1", 9990), Hub).serve_forever()
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedSwarm]:
    with ExitStack() as stack:
        try:
            here = stack.enter_context(booted(tmp_path_factory.mktemp("booted")))
        except NoSystem as error:
            pytest.skip(f"no system can be booted here: {error}")
        report = stack.enter_context(closing(Reporter(environment(), here.command(str(PROGRAMS / "python")))))
        system = BootedSwarm(here, report)
        done = system.run(str(PROGRAMS / "swarm"), "systemd", "install", "--memory-limit", "1GiB")
        assert done.returncode == 0, done.stderr
        for unit, place in HANGS.items():
            hangs = f"Environment=SWARM_FAILPOINTS={place}=hang SWARM_FAILPOINTS_FROM={HANG_AT}-%N\n"
            written(system, f"/etc/systemd/system/{unit}.d/90-impatient.conf", IMPATIENT + hangs)
        system.systemctl("daemon-reload")
        system.systemctl("enable", "--now", "swarm.target", *UNITS)
        yield system


def written(system: BootedSwarm, path: str, text: str, mode: str = "644") -> None:
    code = "import os, pathlib, sys; path = pathlib.Path(sys.argv[1]); path.parent.mkdir(parents=True, exist_ok=True)"
    code += "; path.write_text(sys.argv[2]); path.chmod(int(sys.argv[3], 8))"
    done = system.run(str(PROGRAMS / "python"), "-c", code, path, text, mode)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def serving(system: BootedSwarm) -> BootedSwarm:
    """Both workers have their parts."""
    system.until(lambda: system.num_stages() == 2, "both workers serve")
    return system


@pytest.fixture(scope="module")
def expected(system: BootedSwarm) -> str:
    system.until(lambda: system.num_stages() == 2, "both workers serve")
    said, complaint = generate(system).communicate(timeout=SOON_S)
    assert said, complaint
    return said


def test_all_of_it_serves_and_says_so(serving: BootedSwarm) -> None:
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
        assert serving.shown(unit, "User") == USERS[unit]
    assert int(serving.shown("swarm-worker@w0", "MemoryMax")) == (1 << 30) + (512 << 20)


def test_no_service_reads_what_is_another_s(serving: BootedSwarm) -> None:
    """A gateway or a worker that was taken over finds neither the broker's keys and journal, nor what others have
    joined, nor their memory; and it can't end them."""
    secrets = {
        "swarm-broker": "/var/lib/swarm/broker",
        "swarm-gateway": "/var/lib/swarm/gateway",
        "swarm-worker@w0": "/var/lib/swarm/workers",
    }
    for unit, user in USERS.items():
        for other, folder in secrets.items():
            is_own = USERS[other] == user
            listed = serving.run("runuser", "-u", user, "--", "ls", folder)
            assert (listed.returncode == 0) is is_own, (unit, other, listed.stderr)
            pid = str(serving.pid_of(other))
            for words in (("cat", f"/proc/{pid}/environ"), ("kill", "-0", pid)):
                if not is_own:
                    assert serving.run("runuser", "-u", user, "--", *words).returncode != 0, (unit, other, words)


def test_no_service_leaves_a_copy_of_its_memory(serving: BootedSwarm) -> None:
    """The watchdog ends a process by a signal that has its memory written to the disk where that is allowed."""
    for unit in UNITS:
        limits = serving.run("cat", f"/proc/{serving.pid_of(unit)}/limits").stdout
        (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
        assert line.split()[4:6] == ["0", "0"]


def test_state_of_an_older_installation_is_taken_over(serving: BootedSwarm) -> None:
    """All of Swarm had one user. What the broker and a gateway have is given to theirs when they start."""
    folders = ("/var/lib/swarm/broker", "/var/lib/swarm/gateway")
    serving.systemctl("stop", "swarm-broker.socket", "swarm-broker", "swarm-gateway")
    serving.run("touch", "/var/lib/swarm/gateway/older")
    serving.run("chown", "-R", "swarm:swarm", *folders)
    done = serving.run(str(PROGRAMS / "swarm"), "systemd", "install", "--memory-limit", "1GiB")
    assert done.returncode == 0, done.stderr
    serving.systemctl("start", "swarm-broker", "swarm-gateway")
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")
    owned = serving.run("find", *folders, "-user", "swarm").stdout
    assert owned == ""
    serving.run("rm", "/var/lib/swarm/gateway/older")


def test_events_are_in_the_journal_by_their_fields(serving: BootedSwarm) -> None:
    line = serving.journal("-u", "swarm-broker", "SWARM_EVENT=plan_serving", "-o", "json", "-n", "1")
    event = json.loads(line)
    assert event["PRIORITY"] == "6"
    assert int(event["SWARM_EPOCH"]) >= 1
    assert event["SWARM_CAUSE"]
    assert event["MESSAGE"].startswith("plan_serving ")
    line = serving.journal("-u", "swarm-worker@w0", "SWARM_EVENT=plan_activated", "-o", "json", "-n", "1")
    assert json.loads(line)["SWARM_STAGE"] == json.loads(line)["SWARM_LAYERS"]
    words = ("generate", "--json", "--tokens", "5,6", "--max-tokens", "2")
    request = serving.run(str(PROGRAMS / "swarm"), *words).stdout
    asked = ("-u", "swarm-broker", "SWARM_EVENT=request_ended", "-o", "json", "-n", "1")
    assert json.loads(serving.journal(*asked))["SWARM_REQUEST"] == json.loads(request)["request_id"]


# Of a broker and a gateway that stand still, the next test has another case.
@pytest.mark.parametrize(
    ("signal", "unit"),
    [
        *(("KILL", unit) for unit in ("swarm-worker@w1", "swarm-broker", "swarm-gateway")),
        ("STOP", "swarm-worker@w1"),
        *(pytest.param("STOP", unit, marks=pytest.mark.long) for unit in ("swarm-broker", "swarm-gateway")),
    ],
)
def test_who_dies_or_gives_no_sign_is_started_again_and_answers_go_on(
    serving: BootedSwarm, expected: str, unit: str, signal: str
) -> None:
    """Who is stopped gives no sign, and the watchdog ends it. A stream from a gateway is read on by its last event."""
    before = serving.pid_of(unit)
    with under_way(serving, expected, READS if unit == "swarm-gateway" else ASKS):
        serving.systemctl("kill", "--kill-who=main", f"--signal={signal}", unit)
        serving.until(lambda: serving.pid_of(unit) not in (0, before), "another process is there")
    serving.until(lambda: serving.shown(unit, "ActiveState") == "active", "it is ready")


@pytest.mark.parametrize("unit", ["swarm-worker@w1", "swarm-broker", "swarm-gateway"])
def test_who_hangs_is_ended_and_started_again(serving: BootedSwarm, expected: str, unit: str) -> None:
    """The process lives and does nothing. A worker's loop even goes on, only its compute thread does not: the broker
    goes on without it, and systemd ends it."""
    before = serving.pid_of(unit)
    with under_way(serving, expected, READS if unit == "swarm-gateway" else ASKS):
        serving.run("touch", f"{HANG_AT}-{unit}")
        serving.until(lambda: serving.pid_of(unit) != before, "it is ended")
        serving.run("rm", f"{HANG_AT}-{unit}")
        serving.until(lambda: serving.pid_of(unit) not in (0, before), "another process is there")
    serving.until(lambda: serving.shown(unit, "ActiveState") == "active", "it is ready")
    assert serving.journal("-u", unit, "--grep", "Watchdog timeout")


@pytest.mark.skipif(not MEMORY.exists(), reason=f"no {MEMORY}, by which a test could limit a process's memory")
def test_a_worker_at_the_end_of_its_memory_is_started_again(serving: BootedSwarm, expected: str) -> None:
    """The kernel ends it at the next page that it wants. (In there, systemd has no say about memory: so the limit is
    set from outside, and takes effect as MemoryMax does.)"""
    before = serving.pid_of("swarm-worker@w1")
    with under_way(serving, expected), limited(serving.outside(before)):
        serving.until(lambda: serving.pid_of("swarm-worker@w1") not in (0, before), "another process is there")
    serving.until(lambda: serving.shown("swarm-worker@w1", "ActiveState") == "active", "it is ready")
    assert serving.journal("-u", "swarm-worker@w1", "--grep", "status=9/KILL")


def test_a_newer_package_is_taken_over_while_it_serves(serving: BootedSwarm, expected: str) -> None:
    """As docs/how-to/operations.md tells it: install, workers one after the other, then broker and gateway."""
    before = [serving.pid_of(unit) for unit in UNITS]
    with under_way(serving, expected):
        install_newer(serving)
        done = serving.run(str(PROGRAMS / "swarm"), "systemd", "install", "--memory-limit", "1GiB")
        assert done.returncode == 0, done.stderr
        done = serving.run(str(PROGRAMS / "swarmctl"), "upgrade", "--rolling", "--yes")
        assert done.returncode == 0, done.stderr
        assert {row["version"] for row in versions(serving) if row["process"] != "broker"} == {NEWER}
        serving.systemctl("restart", "swarm-broker", "swarm-gateway")
    assert {row["version"] for row in versions(serving)} == {NEWER}
    assert not {serving.pid_of(unit) for unit in UNITS} & {*before, 0}


def test_who_dies_again_and_again_is_never_parked(serving: BootedSwarm, expected: str) -> None:
    """A crash loop: the others serve meanwhile, and it is back as soon as it lives."""
    with under_way(serving, expected):
        for _ in range(7):  # more than systemd's own limit
            pid = serving.until(lambda: serving.pid_of("swarm-worker@w1"), "it is started again")
            serving.run("kill", "-KILL", str(pid))
            serving.until(lambda pid=pid: serving.pid_of("swarm-worker@w1") != pid, "it is dead")
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")


def systemd_findings(system: BootedSwarm) -> list[dict[str, str]]:
    """What ``swarm doctor`` says of units there."""
    said = system.run(str(PROGRAMS / "swarm"), "doctor", "--json")
    findings: list[dict[str, str]] = json.loads(said.stdout)["findings"]
    assert said.returncode == int(any(each["level"] == "trouble" for each in findings))
    return [each for each in findings if each["about"] == "systemd"]


def test_the_doctor_names_who_dies_again_and_again(serving: BootedSwarm, expected: str) -> None:
    """It comes to nothing at every start, so systemd calls it neither failed nor active; the others serve meanwhile.
    What the doctor says to look at tells why. Put right, it is back by itself, and nothing is in the way."""
    unit, wrong = "swarm-worker@w1.service", "/etc/systemd/system/swarm-worker@w1.service.d/99-wrong.conf"
    written(serving, wrong, "[Service]\nExecStart=\nExecStart=/bin/sh -c 'echo gone wrong >&2; exit 1'\n")
    serving.systemctl("daemon-reload")
    with under_way(serving, expected):
        serving.systemctl("restart", "--no-block", unit)
        serving.until(lambda: serving.shown(unit, "ActiveState") == "activating", "it has stopped, and tries to start")
        serving.until(lambda: int(serving.shown(unit, "NRestarts")) >= MANY_RESTARTS, "it is started again and again")
        (found,) = [each for each in systemd_findings(serving) if each["level"] == "trouble"]
    assert found["text"].startswith(f"{unit} is activating")
    assert "and was restarted" in found["text"]
    command = found["remedy"].split()
    assert command[:3] == ["journalctl", "-u", unit]
    assert "gone wrong" in serving.run(*command).stdout
    serving.run("rm", wrong)
    serving.systemctl("daemon-reload")
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")
    serving.until(lambda: serving.shown(unit, "ActiveState") == "active", "it is ready")
    assert not [each for each in systemd_findings(serving) if each["level"] == "trouble"]


def test_stopping_a_worker_drains_it(serving: BootedSwarm, expected: str) -> None:
    """It takes leave, and the broker lets it go: that is no loss."""
    lost, pid = serving.num_lost(), serving.pid_of("swarm-worker@w1")
    with under_way(serving, expected):
        serving.systemctl("stop", "swarm-worker@w1")
        assert [row["state"] for row in serving.workers() if row["pid"] == pid] == ["left"]
    assert serving.num_lost() == lost
    assert serving.shown("swarm-worker@w1", "Result") == "success"
    assert serving.shown("swarm-worker@w1", "ActiveState") == "inactive"
    assert "worker_asked_to_end" in serving.journal("-u", "swarm-worker@w1", "-n", "20")
    serving.systemctl("start", "swarm-worker@w1")


def test_a_restart_refuses_nobody(serving: BootedSwarm) -> None:
    """The door is systemd's: who knocks meanwhile waits."""
    with nobody_refused(serving, ("127.0.0.1", 5700), ("127.0.0.1", 5701)):
        serving.systemctl("restart", "swarm-broker")
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")


def test_settings_are_read_again(serving: BootedSwarm) -> None:
    settings = "/etc/swarm/swarm.toml"
    serving.run("sh", "-c", f"printf '[log]\\nlevel = \"warning\"\\n[broker]\\nmax_queue = 7\\n' > {settings}")
    before = serving.pid_of("swarm-broker")
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
    assert serving.pid_of("swarm-broker") == before
    assert serving.shown("swarm-broker", "ActiveState") == "active"


def test_plans_obey_what_was_read_again(serving: BootedSwarm, expected: str) -> None:
    """Layers move, the broker's process stays, and so does the answer that is under way."""
    settings, before = "/etc/swarm/swarm.toml", serving.pid_of("swarm-broker")
    with under_way(serving, expected):
        serving.run("sh", "-c", f"printf '[plan]\\npins = {{ w1 = \"0\" }}\\n' > {settings}")
        serving.systemctl("reload", "swarm-broker")
        serving.until(lambda: serving.layers() == {"w1": [0, 1], "w0": [1, 8]}, "w1 has what it was given")
        serving.run("sh", "-c", f": > {settings}")
        serving.systemctl("reload", "swarm-broker")
    assert serving.pid_of("swarm-broker") == before


@pytest.mark.parametrize("workers", ["leave", "are dead"])
def test_what_is_accepted_outlives_a_stop_of_all(serving: BootedSwarm, expected: str, workers: str) -> None:
    """It is under way when all stops. Workers that leave go on for a while, maybe to its end; without any it waits.
    Meanwhile a knock starts nothing: a state directory can be put back."""
    before = serving.num_tokens()
    request = serving.run(str(PROGRAMS / "python"), "-c", SUBMITS).stdout.strip()
    serving.until(lambda: serving.num_tokens() > before + 10, "tokens come")
    if workers == "are dead":
        serving.systemctl("kill", "--kill-who=main", "--signal=KILL", "swarm-worker@w0", "swarm-worker@w1")
    status = serving.report("status")
    assert status["num_running"] + status["num_queued"] == 1
    serving.systemctl("stop", *ALL)
    assert {serving.shown(unit, "ActiveState") for unit in (*UNITS, SOCKET)} <= {"inactive", "failed"}
    assert not is_open(serving, 5700)
    assert not is_open(serving, 5701)
    assert {serving.shown(unit, "ActiveState") for unit in ("swarm-broker", SOCKET)} == {"inactive"}
    serving.systemctl("start", *ALL)
    told = ("-u", "swarm-broker", f"_PID={serving.pid_of('swarm-broker')}", "SWARM_EVENT=requests_restored")
    restored = serving.until(lambda: serving.journal(*told, "-o", "json"), "it tells of them")
    assert workers == "leave" or int(json.loads(restored)["SWARM_UNENDED"]) == 1
    done = serving.run(str(PROGRAMS / "swarm"), "attach", request)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


def test_a_broker_with_settings_that_can_not_work_is_not_tried_again(serving: BootedSwarm) -> None:
    """Neither by systemd nor by who knocks, as both workers do: its doors are shut until it is started by hand."""
    serving.run("sh", "-c", "printf 'nonsense = 1\\n' > /etc/swarm/swarm.toml")
    assert serving.run("systemctl", "restart", "swarm-broker").returncode != 0
    serving.until(lambda: serving.shown(SOCKET, "ActiveState") == "inactive", "its doors are shut")
    assert not is_open(serving, 5701)
    assert serving.shown("swarm-broker", "ActiveState") == "failed"
    assert serving.shown("swarm-broker", "ExecMainStatus") == "78"
    serving.run("sh", "-c", ": > /etc/swarm/swarm.toml")
    serving.systemctl("start", "swarm-broker")
    assert serving.shown(SOCKET, "ActiveState") == "active"
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")


def test_a_restart_refuses_nobody_from_other_machines(serving: BootedSwarm) -> None:
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
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")


def test_secrets_come_as_credentials(serving: BootedSwarm) -> None:
    """The broker's key, which it shows to other machines (the test before this one had it listen to them), and the
    hub's token, which a worker shows to the hub alone. Neither is in the environment."""
    secret, token = "1f" * 32, "hf_of_the_hub"
    written(serving, "/etc/credstore/swarm.key", secret, "600")
    written(serving, "/etc/credstore/swarm.hub-token", token, "600")
    serving.systemctl("restart", "swarm-broker")
    serving.until(lambda: serving.num_stages() == 2, "both workers serve again")
    line = json.loads(serving.swarmctl("invite", "--role", "worker", "--json"))["invitation"]
    assert invitation.decode(line).broker == public_of(secret)
    written(serving, "/hub.py", HUB)
    python = str(PROGRAMS / "python")
    into = ("--property=StandardOutput=file:/hub.log", "--property=StandardError=null")
    serving.run("systemd-run", "--unit=hub", *into, python, "/hub.py")
    mine = "[Service]\nEnvironment=SWARM_MODEL=somebody/mine HF_ENDPOINT=http://127.0.0.1:9990\n"
    written(serving, "/etc/systemd/system/swarm-worker@w9.service.d/50-hub.conf", mine)
    serving.systemctl("daemon-reload")
    serving.systemctl("start", "--no-block", "swarm-worker@w9")
    seen = serving.until((serving.root / "hub.log").read_text, "it asks the hub")
    assert seen.splitlines()[0] == f"Bearer {token}"
    serving.systemctl("stop", "swarm-worker@w9", "hub")
    serving.run("rm", "-r", "/etc/credstore", "/etc/systemd/system/swarm-worker@w9.service.d")
    shown = serving.shown("swarm-worker@w0", "Environment") + serving.shown("swarm-broker", "Environment")
    assert secret not in shown
    assert token not in shown


def test_a_worker_of_another_machine_joins_once_and_is_a_unit_then(serving: BootedSwarm) -> None:
    """Join as in docs/how-to/systemd.md, by the address of other hosts; then by the same key as a credential."""
    line = json.loads(serving.swarmctl("invite", "--role", "worker", "--json"))["invitation"]
    written(serving, "/run/invitation", line, "644")
    words = ("worker", "--join", "/run/invitation", "--name", "far", "--config", "/etc/swarm/swarm.toml")
    state = ("--state-dir", "/var/lib/swarm/workers")
    joining = serving.start("timeout", "60", *AS_WORKER, str(PROGRAMS / "swarm"), *words, *state)
    serving.until(lambda: serving.has("far"), "it has joined")
    (pid,) = {row["pid"] for row in serving.workers() if row["name"] == "far"}
    serving.run("kill", "-INT", str(pid))
    joining.communicate(timeout=SOON_S)
    serving.systemctl("start", "swarm-worker@far")
    assert serving.has("far")
    serving.systemctl("stop", "swarm-worker@far")
    serving.run("mkdir", "-p", "/etc/credstore")
    done = serving.run("sh", "-c", "mv /var/lib/swarm/workers/joined/far-*.json /etc/credstore/swarm.joined")
    assert done.returncode == 0, done.stderr
    serving.systemctl("start", "swarm-worker@far")
    assert serving.has("far")
    serving.systemctl("stop", "swarm-worker@far")
    serving.run("rm", "-r", "/etc/credstore")


def test_an_api_key_is_made_by_the_units_user(serving: BootedSwarm) -> None:
    """Create an API key as in docs/how-to/systemd.md: the gateway accepts it, and no request without one."""
    words = ("swarmctl", "keys", "add", "alice", "--keys-file", "/var/lib/swarm/gateway/keys.json", "--json")
    made = serving.run("sh", "-c", f"cd /root && {' '.join(AS_GATEWAY)} {PROGRAMS}/{' '.join(words)}")
    assert made.returncode == 0, made.stderr
    serving.systemctl("restart", "swarm-gateway")
    asks = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:8000/v1/models")
    assert serving.run(*asks).stdout == "401"
    key = json.loads(made.stdout)["key"]
    assert serving.run(*asks, "-H", f"authorization: Bearer {key}").stdout == "200"


def test_uninstalling_leaves_nothing(system: BootedSwarm) -> None:
    """The last one but that of another user."""
    done = system.run(str(PROGRAMS / "swarm"), "systemd", "uninstall", "--purge")
    assert done.returncode == 0, done.stderr
    listed = ("systemctl", "list-units", "--all", "--plain", "--no-legend", "swarm*")
    # systemd forgets the names of units that are gone a moment later.
    system.until(lambda: "swarm" not in system.run(*listed).stdout, "no unit of Swarm's is known")
    left = system.run("find", "/etc", "/var/lib", "/var/cache", "/run/swarm", "-name", "*swarm*").stdout.split()
    assert [path for path in left if "90-impatient" not in path and not path.endswith(".d")] == []
    assert [user for user in set(USERS.values()) if system.run("id", user).returncode == 0] == []


def test_one_user_has_a_swarm_without_root(system: BootedSwarm) -> None:
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
    system.until(lambda: system.num_stages() == 1, "it serves")
    status = (swarm, "systemd", "status", "--user")
    system.until(lambda: "serving village on 1 stage" in run(*status), "the broker has told systemd so")
    before = run("systemctl", "--user", "show", "--value", "--property", "MainPID", "swarm-broker")
    run("systemctl", "--user", "reload", "swarm-broker")
    assert run("systemctl", "--user", "show", "--value", "--property", "MainPID", "swarm-broker") == before
    run(swarm, "systemd", "uninstall", "--user", "--purge")
    assert run("find", f"/home/{USER}", "-name", "*swarm*") == ""
