"""The units as they are shipped and as they are installed: hardened, right, fitted to the installation."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import swarm.systemd
from swarm.cli.main import run
from swarm.cli.output import EXIT_USAGE
from swarm.cli.up.supervisor import EX_CONFIG
from swarm.config import load
from swarm.systemd.install import (
    UNITS,
    USERS,
    InstallOptions,
    InstallTarget,
    listen_addresses,
    plan_files,
    possible_files,
)

SHIPPED = Path(swarm.systemd.__file__).with_name("units")
SERVICES = ("swarm-broker.service", "swarm-gateway.service", "swarm-worker@.service")
PROGRAM = Path("/opt/a place/swarm")
HOPELESS = (str(EXIT_USAGE), str(EX_CONFIG))  # exit codes after which it would end the same way again
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="not installed: systemd (Debian)")


def exposure(*lines: str) -> float:
    unit = Path(lines[-1])
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", *lines[:-1], str(unit)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_they_are_hardened(name: str) -> None:
    assert exposure(str(SHIPPED / name)) <= 1.5


@pytest.mark.parametrize(("name", "patience_s"), [*zip(SERVICES, (20, 20, 60), strict=True)])
def test_they_are_watched_and_may_have_many_connections(name: str, patience_s: int) -> None:
    lines = (SHIPPED / name).read_text().splitlines()
    assert f"WatchdogSec={patience_s}" in lines
    assert "LimitNOFILE=65536" in lines


def test_each_service_has_a_user_of_its_own_and_writes_no_core() -> None:
    """None reads another's keys, journal or memory; the watchdog's signal leaves no copy of it."""
    units = {name: (SHIPPED / name).read_text().splitlines() for name in SERVICES}
    users = [line for lines in units.values() for line in lines if line.startswith("User=")]
    assert sorted(users) == ["User=swarm", "User=swarm-broker", "User=swarm-gateway"]
    assert {f"User={user}" for user in USERS} == set(users)
    made = re.findall(r"^u (\S+) ", (SHIPPED / "swarm.sysusers").read_text(), re.MULTILINE)
    assert tuple(made) == USERS
    for lines in units.values():
        assert "LimitCORE=0" in lines
        (user,) = [line for line in lines if line.startswith("User=")]
        assert user.replace("User", "Group") in lines


@needs_systemd
def test_with_a_gpu_hardly_less(tmp_path: Path) -> None:
    unit = (SHIPPED / "swarm-worker@.service").read_text() + (SHIPPED / "gpu.conf").read_text()
    (tmp_path / "swarm-worker@.service").write_text(unit)
    assert exposure(str(tmp_path / "swarm-worker@.service")) <= 1.7


def found_wrong(folder: Path, *options: str, **environment: str) -> str:
    """What systemd says of ours in there, drop-ins and all; empty where it is not installed."""
    if shutil.which("systemd-analyze") is None:
        return ""
    units = [str(folder / name.replace("@.", "@w0.")) for name in (*UNITS, "swarm.target")]
    done = subprocess.run(
        ["systemd-analyze", "verify", *options, *units],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    ours = [line for line in done.stderr.splitlines() if "swarm" in line]
    return "\n".join(ours) or ("" if done.returncode == 0 else done.stderr)


@needs_systemd
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    for name in (*UNITS, "swarm.target"):
        text = (SHIPPED / name).read_text().replace("/usr/local/bin/swarm", "/bin/true")
        (tmp_path / name).write_text(text)
    assert found_wrong(tmp_path) == ""


@needs_systemd
def test_systemd_would_have_found_it(tmp_path: Path) -> None:
    for name in (*UNITS, "swarm.target"):
        (tmp_path / name).write_text((SHIPPED / name).read_text().replace("/usr/local/bin/swarm", "/bin/true"))
    (tmp_path / "swarm-broker.socket.d").mkdir()
    (tmp_path / "swarm-broker.socket.d/10-doors.conf").write_text("[Socket]\nListenStream=nowhere:x\n")
    assert "nowhere:x" in found_wrong(tmp_path)


def test_what_is_installed_starts_this_installation() -> None:
    found = plan_files(InstallTarget(Path("/image")), InstallOptions(PROGRAM, 252))
    unit = found[Path("/image/etc/systemd/system/swarm-worker@.service")]
    assert 'ExecStart="/opt/a place/swarm" worker ' in unit
    assert Path("/image/etc/sysusers.d/swarm.conf") in found
    assert not [path for path in found if path.parent.name.endswith(".d") and path.parent.name.startswith("swarm")]


def test_options_are_drop_ins() -> None:
    found = plan_files(InstallTarget(), InstallOptions(PROGRAM, 255, memory_bytes=8 << 30, gpu=True))
    place = Path("/etc/systemd/system/swarm-worker@.service.d")
    assert f"MemoryMax={(8 << 30) + (512 << 20)}" in found[place / "10-memory.conf"]
    assert f"MEMORY_LIMIT={8 << 30}" in found[place / "10-memory.conf"]
    assert "DeviceAllow=char-nvidia" in found[place / "10-gpu.conf"]
    assert "Type=notify-reload" in found[Path("/etc/systemd/system/swarm-broker.service.d/10-reload.conf")]
    assert set(found) <= set(possible_files(InstallTarget()))


def test_what_a_systemd_can_is_by_its_version() -> None:
    """Reloads that wait from 253 on; from 254 on a pause that grows, and is short again after a good start."""
    for version, names in ((252, set()), (253, {"10-reload.conf"}), (254, {"10-reload.conf", "10-backoff.conf"})):
        found = plan_files(InstallTarget(), InstallOptions(PROGRAM, version))
        drop_ins = {path for path in found if path.parent.name.endswith(".service.d")}
        assert {(path.parent.name, path.name) for path in drop_ins} == {
            (f"{unit}.d", name) for unit in SERVICES for name in names
        }
    lines = found[Path("/etc/systemd/system/swarm-broker.service.d/10-backoff.conf")].splitlines()
    assert {"RestartSteps=6", "RestartMaxDelaySec=30", "ExecStartPost=+-systemctl reset-failed %n"} <= set(lines)
    assert drop_ins <= set(possible_files(InstallTarget()))


def test_a_broker_that_can_not_work_has_its_doors_shut_by_its_own_systemd() -> None:
    """They would start it again; a user's systemd is asked by another word."""
    for target, word in (
        (InstallTarget(), "systemctl"),
        (InstallTarget(is_user=True, home=Path("/home/ann")), "systemctl --user"),
    ):
        found = plan_files(target, InstallOptions(PROGRAM, 254))
        assert f" {word} stop --no-block swarm-broker.socket" in found[target.units / "swarm-broker.service"]
        backoff = found[target.units / "swarm-broker.service.d/10-backoff.conf"]
        assert f"ExecStartPost=+-{word} reset-failed %n" in backoff


BOTH_KINDS = pytest.mark.parametrize(
    "target", [InstallTarget(), InstallTarget(is_user=True, home=Path("/home/ann"))], ids=["of the system", "of a user"]
)


@BOTH_KINDS
@pytest.mark.parametrize("name", SERVICES)
def test_settings_that_can_not_work_are_not_tried_again(name: str, target: InstallTarget) -> None:
    """All else is, however often: only the exit codes are left out by which a service says that it won't help, since
    its settings are wrong, or its options."""
    lines = plan_files(target, InstallOptions(PROGRAM, 252))[target.units / name].splitlines()
    assert {"Restart=on-failure", "StartLimitIntervalSec=0"} <= set(lines)
    assert [line for line in lines if line.startswith("RestartPrevent")] == [
        f"RestartPreventExitStatus={' '.join(HOPELESS)}"
    ]
    good = [line.partition("=")[2].split() for line in lines if line.startswith("SuccessExitStatus=")]
    assert not {*HOPELESS} & {code for codes in good for code in codes}


@BOTH_KINDS
@pytest.mark.parametrize("status", [*HOPELESS, "0", "1", "KILL", ""])
def test_a_broker_shuts_its_doors_only_if_it_can_not_work(target: InstallTarget, status: str, tmp_path: Path) -> None:
    """The line of its unit is run, with somebody else in systemctl's place. EXIT_STATUS: as systemd sets it; a signal's
    name if one has ended it."""
    told = tmp_path / "told"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$*" > {shlex.quote(str(told))}\n')
    (tmp_path / "systemctl").chmod(0o755)
    unit = plan_files(target, InstallOptions(PROGRAM, 252))[target.units / "swarm-broker.service"]
    (line,) = re.findall(r"^ExecStopPost=\+-(.*)$", unit, re.MULTILINE)
    path = f"{tmp_path}:{os.defpath}"
    done = subprocess.run(
        shlex.split(line.replace("$$", "$")),
        env={"PATH": path, "EXIT_STATUS": status},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    words = "--user " if target.is_user else ""
    expected = f"{words}stop --no-block swarm-broker.socket\n" if status in HOPELESS else None
    assert (told.read_text() if told.exists() else None) == expected


def test_the_kernels_limits_are_above_the_workers_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a worker is told is read by it as that; it is slowed before it is ended; without a limit there is none."""
    monkeypatch.chdir(tmp_path)
    name = Path("/etc/systemd/system/swarm-worker@.service.d/10-memory.conf")
    assert name not in plan_files(InstallTarget(), InstallOptions(PROGRAM, 252))
    lines = dict(
        re.findall(
            r"^(\w+)=(.*)$", plan_files(InstallTarget(), InstallOptions(PROGRAM, 252, memory_bytes=8 << 30))[name], re.M
        )
    )
    variable, _, value = lines["Environment"].partition("=")
    monkeypatch.setenv(variable, value)
    told = load().worker.memory_limit
    assert told == 8 << 30
    assert told < int(lines["MemoryHigh"]) < int(lines["MemoryMax"]) <= told + (1 << 29)


def test_doors_are_held_open_where_the_settings_have_them() -> None:
    place = Path("/etc/systemd/system/swarm-broker.socket.d/10-doors.conf")
    assert place not in plan_files(
        InstallTarget(), InstallOptions(PROGRAM, 252, addresses=listen_addresses("127.0.0.1", 5700, ()))
    )
    moved = plan_files(
        InstallTarget(), InstallOptions(PROGRAM, 252, addresses=listen_addresses("127.0.0.1", 5800, ()))
    )[place]
    assert re.findall("^ListenStream=(.*)$", moved, re.MULTILINE) == ["", "127.0.0.1:5800", "127.0.0.1:5801"]
    others = listen_addresses("::1", 5700, ("192.0.2.1", "2001:db8::1"))
    assert others == tuple(
        f"{address}:{port}" for address in ("[::1]", "192.0.2.1", "[2001:db8::1]") for port in range(5700, 5705)
    )
    assert "FreeBind=yes" in plan_files(InstallTarget(), InstallOptions(PROGRAM, 252, addresses=others))[place]
    assert place in possible_files(InstallTarget())


@pytest.fixture
def installed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this Python were not in somebody's home."""
    monkeypatch.setattr("swarm.cli.systemd.files._HIDDEN", ())
    monkeypatch.setattr("swarm.cli.systemd.files._USUAL", ("/bin/true",))


@pytest.mark.usefixtures("installed_for_all")
def test_an_image_gets_what_any_systemd_understands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its systemd is not the one that runs here; and of its interfaces nobody here knows the addresses."""
    (tmp_path / "etc/swarm").mkdir(parents=True)
    (tmp_path / "etc/swarm/swarm.toml").write_text('state_dir = "x"\nbroker.listen = ["192.0.2.1", "eth7"]\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/true").touch()
    assert run(["systemd", "install", "--root", str(tmp_path)]) == 0
    assert "eth7: an address that only the machine itself can resolve" in capsys.readouterr().out
    drop_ins = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.conf") if "swarm-" in str(path)}
    assert drop_ins == {"etc/systemd/system/swarm-broker.socket.d/10-doors.conf"}
    assert "192.0.2.1:5704" in next(tmp_path.rglob("10-doors.conf")).read_text()
    assert found_wrong(tmp_path / "etc/systemd/system") == ""
    assert run(["systemd", "uninstall", "--root", str(tmp_path)]) == 0
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {tmp_path / "etc/swarm/swarm.toml", tmp_path / "bin/true"}


@pytest.mark.usefixtures("installed_for_all")
def test_settings_with_a_mistake_are_told_and_nothing_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "etc/swarm").mkdir(parents=True)
    (tmp_path / "etc/swarm/swarm.toml").write_text("broker.port = 0\n")
    assert run(["systemd", "install", "--root", str(tmp_path)]) == 1
    assert "broker.port" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.service"))


@needs_systemd
def test_a_users_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    target = InstallTarget(is_user=True, home=tmp_path)
    wanted = InstallOptions(
        Path("/bin/true"), 252, memory_bytes=8 << 30, addresses=listen_addresses("127.0.0.1", 5800, ())
    )
    for path, text in plan_files(target, wanted).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert found_wrong(target.units, "--user", HOME=str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path)) == ""


def test_for_one_user_nothing_asks_for_root() -> None:
    target = InstallTarget(is_user=True, home=Path("/home/ann"))
    found = plan_files(target, InstallOptions(PROGRAM, 252))
    assert {path.parent for path in found} == {Path("/home/ann/.config/systemd/user")}
    unit = found[target.units / "swarm-broker.service"]
    for key in ("User=", "OOMScoreAdjust=", "CapabilityBoundingSet=", "PrivateDevices=", "ProtectSystem="):
        assert key not in unit
    assert "NoNewPrivileges=yes" in unit
    assert "WantedBy=default.target" in found[target.units / "swarm.target"]


def test_a_path_that_systemd_starts_nothing_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be found out at the first start, in the journal."""
    place = tmp_path / "o'clock"
    place.mkdir()
    (place / "swarm").touch()
    monkeypatch.setattr("sys.executable", str(place / "python"))
    assert run(["systemd", "install", "--root", str(tmp_path)]) == 1
    assert "no program with quotes" in capsys.readouterr().err
    assert not (tmp_path / "etc").exists()
