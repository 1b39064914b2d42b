"""The units as they are shipped and as they are installed: hardened, right, fitted to the installation."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swarm.service.install import UNITS, Target, Wanted, may_be_there, planned

SHIPPED = Path(__file__).parents[3] / "systemd"
SERVICES = ("swarm-broker.service", "swarm-gateway.service", "swarm-worker@.service")
PROGRAM = Path("/opt/a place/swarm")
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


@needs_systemd
def test_with_a_gpu_hardly_less(tmp_path: Path) -> None:
    unit = (SHIPPED / "swarm-worker@.service").read_text() + (SHIPPED / "gpu.conf").read_text()
    (tmp_path / "swarm-worker@.service").write_text(unit)
    assert exposure(str(tmp_path / "swarm-worker@.service")) <= 1.7


@needs_systemd
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    for name in (*UNITS, "swarm.target"):
        text = (SHIPPED / name).read_text().replace("/usr/local/bin/swarm", "/bin/true")
        (tmp_path / name).write_text(text)
    units = [str(tmp_path / name.replace("@.", "@w0.")) for name in (*UNITS, "swarm.target")]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    ours = [line for line in done.stderr.splitlines() if "swarm" in line]
    assert not ours
    assert done.returncode == 0, done.stderr


def test_what_is_installed_starts_this_installation() -> None:
    found = planned(Target(Path("/image")), Wanted(PROGRAM, 252))
    unit = found[Path("/image/etc/systemd/system/swarm-worker@.service")]
    assert 'ExecStart="/opt/a place/swarm" worker ' in unit
    assert Path("/image/etc/sysusers.d/swarm.conf") in found
    assert not [path for path in found if path.parent.name.endswith(".d") and path.parent.name.startswith("swarm")]


def test_options_are_drop_ins() -> None:
    found = planned(Target(), Wanted(PROGRAM, 255, memory_bytes=8 << 30, gpu=True))
    place = Path("/etc/systemd/system/swarm-worker@.service.d")
    assert f"MemoryMax={(8 << 30) + (512 << 20)}" in found[place / "10-memory.conf"]
    assert f"MEMORY_LIMIT={8 << 30}" in found[place / "10-memory.conf"]
    assert "DeviceAllow=char-nvidia" in found[place / "10-gpu.conf"]
    assert "Type=notify-reload" in found[Path("/etc/systemd/system/swarm-broker.service.d/10-reload.conf")]
    assert set(found) <= set(may_be_there(Target()))


def test_for_one_user_nothing_asks_for_root() -> None:
    target = Target(is_user=True, home=Path("/home/ann"))
    found = planned(target, Wanted(PROGRAM, 252))
    assert {path.parent for path in found} == {Path("/home/ann/.config/systemd/user")}
    unit = found[target.units / "swarm-broker.service"]
    for key in ("User=", "OOMScoreAdjust=", "CapabilityBoundingSet=", "PrivateDevices=", "ProtectSystem="):
        assert key not in unit
    assert "NoNewPrivileges=yes" in unit
    assert "WantedBy=default.target" in found[target.units / "swarm.target"]
