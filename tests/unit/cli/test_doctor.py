"""``swarm doctor``: what it finds in a machine, told by facts; and the facts, told by machines in real trouble."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from swarm.cli.app import app
from swarm.cli.doctor import facts as asked
from swarm.cli.doctor.checks import (
    BrokerConnectivity,
    Facts,
    Finding,
    Kernels,
    ModelFacts,
    Port,
    SpeedEstimate,
    SystemdUnit,
    make_findings,
)
from swarm.cli.doctor.command import format_finding
from swarm.config import load
from swarm.demo import model_path
from swarm.stage.shell.openmp import PASSIVE_WAITING
from swarm.systemd.install import listen_addresses
from tests.standin_hub import NAME, Hub, standin

GIB = 1 << 30
SOUND = Facts(
    python=(3, 11),
    packages={"torch": "2.13.0", "transformers": "5.23.0"},
    processor="Abacus 9000",
    cores=8,
    quota=None,
    memory_bytes=32 * GIB,
    available_bytes=24 * GIB,
    memory_limit=None,
    state_dir="/var/lib/swarm",
    room_bytes=100 * GIB,
    sync_s=0.001,
    state_wrong="",
    descriptors=20_000,
    ports=(Port(5700, "the broker's, for clients", True), Port(8000, "the gateway's", True)),
    kernels=Kernels("avx512bf16"),
    gpus=("cuda:0: H200, 139 GiB",),
    clock_is_set=True,
    model=ModelFacts("/models/llama", GIB // 2),
    units=(SystemdUnit("swarm-broker.service", "active", "running"),),
)


def in_a_loop(restarts: int, sub: str, *, is_users: bool = False) -> dict[str, object]:
    return {"units": (SystemdUnit("swarm-worker@a.service", "activating", sub, restarts, is_users),)}


def too_large(error: str) -> dict[str, object]:
    return {"model": ModelFacts("llama", 30 * GIB), "outlook": SpeedEstimate(error=error, is_short=True)}


def wrong(**changes: object) -> list[Finding]:
    return [each for each in make_findings(replace(SOUND, **changes)) if each.level != "ok"]  # type: ignore[arg-type]


def one(**changes: object) -> Finding:
    (found,) = wrong(**changes)
    return found


def test_a_sound_machine() -> None:
    """Each thing that was looked at has a line, and none asks for anything."""
    found = make_findings(SOUND)
    assert not wrong()
    assert all(not each.remedy for each in found)
    assert [each.about for each in found] == [
        *("packages", "processor", "kernels", "gpu", "memory", "state", "descriptors", "port", "clock", "model"),
        "systemd",
    ]


@pytest.mark.parametrize(
    ("changes", "about", "level", "says", "remedy"),
    [
        ({"python": (3, 10)}, "python", "trouble", "Python 3.10", "3.11 or newer"),
        ({"packages": {"torch": None}}, "packages", "note", "torch not installed", "swarm-llm[worker]"),
        ({"kernels": Kernels("", "no compiler")}, "kernels", "trouble", "no compiler", "C compiler"),
        ({"kernels": Kernels("avx2", "", "amx: 3 of 64 differ")}, "kernels", "note", "amx: 3 of 64 differ", "exact"),
        ({"available_bytes": GIB}, "memory", "trouble", "1.0 GiB of 32.0 GiB", "stop other programs"),
        ({"memory_limit": GIB}, "memory", "trouble", "1.0 GiB of 1.0 GiB", "2.0 GiB"),
        ({"state_wrong": "it is a file"}, "state", "trouble", "/var/lib/swarm: it is a file", "--state-dir"),
        ({"room_bytes": GIB // 2}, "state", "trouble", "512 MiB free", "free disk space"),
        ({"sync_s": 0.2}, "state", "note", "200 ms", "faster disk"),
        ({"descriptors": 1024}, "descriptors", "note", "1,024", "ulimit -n 4096"),
        ({"ports": (Port(5700, "a", False, "nc (process 7)"),)}, "port", "note", "by nc (process 7)", "stop"),
        ({"clock_is_set": False}, "clock", "note", "not synchronised", "time service"),
        ({"model": ModelFacts("llama", error="there is no directory llama")}, "model", "trouble", "no directory", "another"),
        ({"model": ModelFacts("x", 99 * GIB, "X can't be cut", is_refused=True)}, "model", "trouble", "can't be cut", "another one"),
        ({"model": ModelFacts("llama", 30 * GIB)}, "model", "note", "more than is available here (24.0 GiB)", "invite"),
        (too_large("it waits for 9 GiB more"), "outlook", "trouble", "no plan: it waits for 9 GiB more", "free memory"),
        ({"keys_wrong": ("others may read k",)}, "keys", "trouble", "others may read k", "swarmctl keys rotate"),
        ({"reach": BrokerConnectivity("tcp://b", error="nobody", remedy="a wall?")}, "broker", "trouble", "nobody", "a wall?"),
        ({"reach": BrokerConnectivity("tcp://b", "0.2.0", 0.001, 1e6, True)}, "broker", "trouble", "large ones get lost", "MTU"),
        ({"reach": BrokerConnectivity("tcp://b", "0.2.0", 0.08, 1e9)}, "broker", "note", "80 ms there and back", "nearer"),
        ({"reach": BrokerConnectivity("tcp://b", "0.2.0", 0.001, 1e6)}, "broker", "note", "977 KiB a second", "faster network"),
        ({"state_is_hidden": True}, "state", "note", "/var/lib/swarm is not accessible to this user", "sudo"),
        ({"gpu_unused": "there is one (/dev/kfd), and"}, "gpu", "note", "/dev/kfd", "a torch that is built for it"),
        ({"listen_wrong": "no interface 'eth9'"}, "port", "trouble", "broker.listen: no interface", "--listen"),
        ({"ports": (Port(80, "a", False, bind_error="Permission denied"),)}, "port", "trouble", "can't be used", "--port"),
        ({"units": (SystemdUnit("swarm-worker@a.service", "failed"),)}, "systemd", "trouble", "has failed", "-u swarm-w"),
        (in_a_loop(1, "auto-restart"), "systemd", "trouble", "(auto-restart), and was restarted once", "-u sw"),
        (in_a_loop(9, "start"), "systemd", "trouble", "(start), and was restarted 9 times", "journalctl"),
        (in_a_loop(9, "auto-restart", is_users=True), "systemd", "trouble", "9 times", "journalctl --user -u swarm-w"),
        ({"units": (SystemdUnit("swarm-gateway.service", "active", "running", 3),)}, "systemd", "note", "3 times", "upgrades"),
    ],
)  # fmt: skip
def test_trouble_is_named_with_its_remedy(
    changes: dict[str, object], about: str, level: str, says: str, remedy: str
) -> None:
    """One line for it, and nothing else is disturbed by it."""
    found = one(**changes)
    assert (found.about, found.level) == (about, level)
    assert says in found.text
    assert remedy in found.remedy


def test_units_that_are_as_they_should_be() -> None:
    """One waits for its broker, one was stopped after some upgrades, one died once: nothing is asked for."""
    waiting = SystemdUnit("swarm-worker@w0.service", "activating", "start")
    stopped = SystemdUnit("swarm-worker@w1.service", "inactive", "dead", 4)
    once = SystemdUnit("swarm-broker.service", "active", "running", 1)
    assert not wrong(units=(waiting, stopped, once))


def test_memory_and_cores_that_a_container_gives() -> None:
    """What counts is what this process may use."""
    told = {each.about: each.text for each in make_findings(replace(SOUND, memory_limit=8 * GIB, quota=2.5))}
    assert told["memory"] == "8.0 GiB of 8.0 GiB available (this machine has 32.0 GiB, a container or unit gives less)"
    assert told["processor"] == "Abacus 9000, 8 cores, of which a container gives 2.5"


def test_an_outlook_is_told_by_the_number_of_sequences() -> None:
    ahead = SpeedEstimate(((1, 13.04), (16, 1180.0)), 0.52, (6, 2))
    told = {each.about: each.text for each in make_findings(replace(SOUND, outlook=ahead))}
    assert told["outlook"] == (
        "with 6 + 2 layers, by sequences that decode together: 1: 13 tokens/s, 16: 1,180 tokens/s; "
        "a prompt of 512 tokens takes 0.52 s"
    )


def test_what_is_found_of_a_processor_a_model_and_a_way() -> None:
    ahead = SpeedEstimate(((1, 13.0),), 0.5, (8,), 3 * GIB, 5 * GIB, 40_000)
    model = ModelFacts("/models/llama", GIB // 2, digest="0123456789abcdef", limits="text only")
    kernels = Kernels("avx512bf16", features=("avx2", "avx512_bf16"))
    way = BrokerConnectivity("tcp://b:5700", "0.2.0", 0.0004, 1e12)
    told = {
        each.about: (each.level, each.text)
        for each in make_findings(replace(SOUND, outlook=ahead, model=model, kernels=kernels, reach=way))
    }
    assert told["kernels"] == (
        "ok",
        "Swarm's own, variant avx512bf16; the processor has avx2 avx512_bf16",
    )
    assert told["model"] == ("ok", "/models/llama, 512 MiB of weights, files 0123456789abcdef, text only")
    assert told["room"] == (
        "ok",
        "a worker needs up to 3.0 GiB of the 5.0 GiB that it has for the model; there is memory for the keys and "
        "values of 40,000 positions",
    )
    assert told["broker"] == (
        "ok",
        "tcp://b:5700, swarm 0.2.0: 0.4 ms there and back, throughput too high to measure",
    )


def test_how_a_finding_is_shown() -> None:
    assert format_finding(Finding("port", "note", "5700 is in use", "stop it")) == [
        "· port         5700 is in use",
        "               → stop it",
    ]
    assert format_finding(Finding("clock", "ok", "kept right")) == ["  clock        kept right"]


# --- real machines, in real trouble -----------------------------------------------------------------------------------


def test_a_taken_port_and_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        settings = load(None, {"broker.port": number})
        found = {port.number: port for port in asked.needed_ports(settings)[0]}
    assert not found[number].is_free
    assert f"(process {os.getpid()})" in found[number].holder
    free = {port.number: port for port in asked.needed_ports(settings)[0]}
    assert free[number].is_free


def test_doors_for_other_machines_are_tried_where_they_will_be() -> None:
    """All of them, at each address, as systemd would hold them open; an address that nobody has here is told, and so is
    an interface."""
    settings = load(None, {"broker.listen": ["192.0.2.1"]})
    found, wrong = asked.needed_ports(settings)
    wanted = listen_addresses(settings.broker.host, settings.broker.port, settings.broker.listen)
    assert [port.number for port in found[:-1]] == [int(door.rpartition(":")[2]) for door in wanted]
    assert [port.use for port in found if port.bind_error] == [
        f"the broker's, for {use} at 192.0.2.1"
        for use in ("clients", "workers", "heartbeats", "finished steps", "the relay")
    ]
    assert wrong == ""
    found, wrong = asked.needed_ports(load(None, {"broker.listen": ["nowhere0"]}))
    assert "no network interface 'nowhere0'" in wrong
    assert len(found) == 3


def test_a_worker_needs_one_of_its_ports() -> None:
    """Nothing is said while one is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        settings = load(None, {"worker.data_ports": f"{number}-{number}", "worker.host": "127.0.0.1"})
        found = asked.needed_ports(settings)[0]
    assert [port.number for port in found][3:] == [number]
    assert f"all of worker.data_ports, {number}-{number}" in found[-1].use
    assert f"(process {os.getpid()})" in found[-1].holder
    assert len(asked.needed_ports(settings)[0]) == 3


def test_a_gpu_that_torch_can_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device is there: that is told, with why. Where there is none, or torch has it, nothing is."""
    torch = pytest.importorskip("torch")
    device = tmp_path / "nvidia0"
    assert asked.gpu_unused([device]) == ""
    device.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    for cuda, why in ((None, "is built for CPUs only"), ("12.8", "finds no GPU through the driver")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert asked.gpu_unused([tmp_path / "kfd", device]) == (
            f"there is one ({device}), but torch {torch.__version__} {why}"
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert asked.gpu_unused([device]) == ""


SYSTEMCTL = """#!/bin/sh
[ "$1" = --user ] && { echo "Failed to connect to bus: No medium found" >&2; exit 1; }
printf 'Id=swarm-worker@w0.service\\nActiveState=activating\\nSubState=auto-restart\\nStatusText=\\nNRestarts=7\\n\\n'
printf 'Id=swarm-broker.socket\\nActiveState=active\\nSubState=running\\n'
"""


def test_units_are_asked_for_what_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often they were started again, too; a user's systemd that does not answer has none."""
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asked.list_units(is_users=False) == [
        SystemdUnit("swarm-worker@w0.service", "activating", "auto-restart", 7),
        SystemdUnit("swarm-broker.socket", "active", "running"),
    ]
    assert asked.list_units(is_users=True) == []


def test_where_nothing_can_be_written() -> None:
    """A pseudo file system is nobody's to write to, root's neither."""
    said, took = asked.measure_sync(Path("/proc/swarm"))
    assert said.startswith("nothing can be written there")
    assert took is None


def test_a_write_is_timed_where_the_directory_would_be_made(tmp_path: Path) -> None:
    said, took = asked.measure_sync(tmp_path / "not" / "there")
    assert said == ""
    assert took is not None
    assert list(tmp_path.iterdir()) == []  # and nothing is left


def test_keys_that_others_may_read(tmp_path: Path) -> None:
    (tmp_path / "joined").mkdir()
    for name in ("broker.key", "joined/5f-0a.json", "keys.json"):
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(0o600)
    assert asked.readable_by_others(tmp_path) == []
    (tmp_path / "joined/5f-0a.json").chmod(0o640)
    (said,) = asked.readable_by_others(tmp_path)
    assert said.startswith(f"others may read {tmp_path}/joined/5f-0a.json (chmod 600")


@pytest.mark.parametrize(
    ("listing", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "a/memory.max": "1000\n"}, 500),
        ("0::/\n", {}, None),
        ("3:memory:/a\n2:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "700\n", "cpu/a/memory.max": "1\n"}, 700),
    ],
)
def test_the_least_limit_of_the_groups_around(
    tmp_path: Path, listing: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "listing").write_text(listing)
    assert asked.memory_limit(tmp_path / "listing", tmp_path) == limit


@contextmanager
def few_descriptors(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_few_descriptors() -> None:
    with few_descriptors(900):
        assert asked.descriptors() == 900


def test_ports_of_the_users_own_swarm_are_one_note() -> None:
    own = tuple(Port(number, "the broker's", False, "python (process 7)", True) for number in (5700, 5701, 8000))
    note = one(ports=own)
    assert (note.level, note.remedy) == ("note", "")
    assert note.text.startswith("5700, 5701, 8000 in use by your running swarm")
    both = wrong(ports=(*own, Port(8001, "a", False, "nc (process 9)")))
    assert [each.text.partition(" ")[0] for each in both] == ["5700,", "8001"]


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        (["/opt/swarm/bin/python", "-P", "-m", "swarm", "broker", "--url", "tcp://127.0.0.1:5700"], True),
        (["/opt/swarm/bin/python", "/opt/swarm/bin/swarm", "up"], True),
        (["swarm --log-level info broker"], True),
        (["nc", "-l", "5700"], False),
        (["/usr/bin/docker", "node", "ls", "swarm"], False),
        ([], False),
    ],
)
def test_a_process_of_a_swarm_is_known_by_its_command(command: list[str], is_ours: bool) -> None:
    assert asked.is_swarm(command) is is_ours


def test_a_refused_family_is_known_without_its_weights(tmp_path: Path) -> None:
    """Memory would not help: the model's finding says so, and there is no outlook."""
    folder = tmp_path / "compressed"
    shutil.copytree(model_path(), folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": ["compressed_sparse_attention"] * 8}))
    found = asked.inspect_model(str(folder))
    assert found is not None
    assert found.is_refused
    [finding] = wrong(model=replace(found, weight_bytes=99 * GIB))
    assert "layers of type compressed_sparse_attention keep a state that is not supported" in finding.text
    assert "memory" not in finding.remedy


def test_a_damaged_model(tmp_path: Path) -> None:
    """Cut in the middle, as by a copy that broke off."""
    folder = tmp_path / "village"
    shutil.copytree(model_path(), folder)
    assert asked.inspect_model(str(folder)) == replace(asked.inspect_model(None), name=str(folder))  # type: ignore[type-var]
    weights = next(folder.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    found = asked.inspect_model(str(folder))
    assert found is not None
    assert weights.name in found.error


def test_copies_of_a_model_have_one_digest(tmp_path: Path) -> None:
    """On whatever machine, in whatever folder; and another one as soon as a byte is another."""
    copy = tmp_path / "a copy"
    shutil.copytree(model_path(), copy)
    own, theirs = asked.inspect_model(None), asked.inspect_model(str(copy))
    assert own is not None
    assert theirs is not None
    assert own.digest == theirs.digest != ""
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = asked.inspect_model(str(copy))
    assert changed is not None
    assert changed.digest != own.digest


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    found = asked.inspect_model(str(tmp_path / "nowhere"))
    assert found is not None
    assert "there is no directory" in found.error


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    """As a person calls it, with an outlook for two workers; the exit code says that something is in the way."""
    state = tmp_path / "öd platz"
    (state / "joined").mkdir(parents=True)
    (state / "broker.key").write_text("secret")
    (state / "broker.key").chmod(0o644)
    command = [sys.executable, "-m", "swarm", "doctor", "--json", "--state-dir", str(state), "--model"]
    done = subprocess.run(
        [*command, str(model_path())], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    found = {each["about"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["keys"]["level"] == "trouble"
    assert found["model"]["level"] == "ok"
    assert "layers, by sequences that decode together: 1: " in found["outlook"]["text"]
    assert not (state / "journal.sqlite").exists()


def spans(hub: Hub, file: str) -> list[int]:
    """How many bytes of it each question asked for."""
    asked_for = [line.partition(" bytes=")[2] for line in hub.asked if f"/{file} bytes=" in line]
    return [int(last) - int(first) + 1 for first, _, last in (each.partition("-") for each in asked_for)]


@pytest.mark.slow
def test_a_model_on_a_hub_is_told_without_its_weights(tmp_path: Path) -> None:
    """How fast it would be, too: the small files are fetched, and of the weights the header and samples alone."""
    files = {path.name: path.read_bytes() for path in model_path().iterdir() if path.is_file()}
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "SWARM_"))}
    ours = {"HF_HOME": str(tmp_path / "hub"), "SWARM_STATE_DIR": str(tmp_path)}
    with standin(files) as hub:
        done = subprocess.run(
            [sys.executable, "-m", "swarm", "doctor", "--json", "--model", NAME],
            cwd=tmp_path,
            env={**clean, **ours, "HF_ENDPOINT": hub.endpoint},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["about"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["model"]["text"].startswith(f"{NAME}, 5 MiB of weights (5 MiB to fetch from the hub), files ")
    assert "layers, by sequences that decode together: 1: " in found["outlook"]["text"]
    assert hub.fetched_weights() == []
    assert {"config.json", "tokenizer.json"} <= set(hub.fetched())
    assert set(hub.parts()) == {"model.safetensors"}
    assert sum(spans(hub, "model.safetensors")) < len(files["model.safetensors"]) / 10
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_the_forecast_is_measured_with_threads_that_wait_as_a_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP reads it once, when torch is loaded: before anything is gathered. Others told a third too much."""
    seen: list[str | None] = []

    def gather(_settings: object, _workers: int, *, is_of_units: bool) -> Facts:
        seen.append(os.environ.get("OMP_WAIT_POLICY"))
        return SOUND

    for name in (*PASSIVE_WAITING, "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(asked, "gather", gather)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert seen == ["PASSIVE"]


def test_gpus_are_listed_with_what_computes_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, what torch is built for, and whether there is triton."""
    torch = pytest.importorskip("torch")
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version:  gcc\n")
    assert asked._read_driver_version(version) == "580.65.06"
    assert asked._read_driver_version(tmp_path / "none") == ""
    monkeypatch.setattr(asked, "_read_driver_version", lambda: "580.65.06")
    monkeypatch.setattr(asked, "_version", {"triton": "3.6.0"}.get)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    about = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 << 30, 139 << 30))
    says = "driver 580.65.06, torch 2.11.0+cu130 for CUDA 13.0, triton 3.6.0"
    assert asked._gpus() == (f"cuda:0: NVIDIA H200, 100 of 139 GiB free; {says}",)
    monkeypatch.setattr(asked, "_version", lambda _: None)
    assert asked._gpus()[0].endswith("no triton: torch's kernels compute")
