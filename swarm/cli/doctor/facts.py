"""Collection of facts about the machine. Each question is independent, so a failing one does not affect the others."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Final

import psutil

from swarm.cli.doctor.checks import BrokerConnectivity, Facts, Kernels, ModelFacts, Port, SpeedEstimate, SystemdUnit
from swarm.cli.doctor.paths import find_units, list_state_dirs
from swarm.cli.meta.packages import FOR_MODELS
from swarm.cli.systemd import manager
from swarm.cli.systemd.files import SystemdError
from swarm.errors import ConfigError, ModelError, UnservedModel
from swarm.wire.addresses import resolve_own

if TYPE_CHECKING:
    from swarm.config import Settings, WorkerSettings

_KEYS: Final = ("broker.key", "keys.json", "roll.json", "joined/*.json")
_FEATURES: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_UNSYNCHRONISED: Final = 5  # result of adjtimex if the clock is not synchronised
_NUM_SYNCS: Final = 3
_PATIENCE_S: Final = 5.0
_GPU_DEVICES: Final = (Path("/dev/nvidia0"), Path("/dev/kfd"))
_DRIVER_VERSION: Final = Path("/proc/driver/nvidia/version")
_PORT_USES: Final = ("for clients", "for workers", "for heartbeats", "for finished steps", "for the relay")
_NUM_LOCAL_PORTS: Final = 2  # if no other machine is served, the remaining ports are chosen freely


def gather(settings: Settings, workers: int = 0, *, is_of_units: bool = False) -> Facts:
    """Collect all facts, within a few seconds.

    ``settings`` are those of a swarm that would be started here. ``workers`` is the number of workers to estimate the
    speed for; 0 skips that measurement. ``is_of_units``: the state belongs to a service's user, and this user may lack
    access to it.
    """
    from swarm.auth.memberships import default_state_dir
    from swarm.stage.engine import cpu_quota

    places = list_state_dirs(settings.state_dir or default_state_dir())
    state = places[:2][-1]
    is_hidden = is_of_units and not os.access(_existing(state), os.W_OK)
    wrong, sync_s = ("", None) if is_hidden else measure_sync(state)
    ports_here, listen_wrong = needed_ports(settings)
    memory, found = psutil.virtual_memory(), inspect_model(settings.model)
    return Facts(
        python=sys.version_info[:2],
        packages={name: _version(name) for name in FOR_MODELS},
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=cpu_quota.read_cpu_limit(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        memory_limit=memory_limit(),
        state_dir=str(state),
        room_bytes=None if wrong else shutil.disk_usage(_existing(state)).free,
        sync_s=sync_s,
        state_wrong=wrong,
        state_is_hidden=is_hidden,
        descriptors=descriptors(),
        ports=tuple(ports_here),
        listen_wrong=listen_wrong,
        kernels=_kernels(),
        gpus=_gpus(),
        gpu_unused=gpu_unused(),
        clock_is_set=_clock_is_set(),
        model=found,
        outlook=_estimate_speed(settings, workers) if workers and found is not None and not found.error else None,
        keys_wrong=tuple(wrong for place in places for wrong in readable_by_others(place)),
        units=tuple(unit for is_users in (False, True) for unit in list_units(is_users)),
        reach=_check_connectivity(_worker_settings(settings, places)),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    import platform

    return platform.processor() or platform.machine()


def memory_limit(listing: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the smallest memory limit of this process's control groups and their parents; None if there is none."""
    try:
        lines = listing.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            with suppress(OSError, ValueError):  # "max" is not a number
                limits.append(int((root.joinpath(*parts[:depth]) / name).read_text("ascii")))
    return min(limits, default=None)


def _existing(path: Path) -> Path:
    """Return the directory, or the closest existing parent in which it would be created."""
    return next(each for each in (path, *path.absolute().parents) if os.path.exists(each))


def measure_sync(state: Path) -> tuple[str, float | None]:
    """Return why nothing can be written there, and how many seconds a small durable write takes."""
    folder = _existing(state)
    durations: list[float] = []
    try:
        with NamedTemporaryFile(dir=folder, prefix=".swarm-doctor-") as file:
            for _ in range(_NUM_SYNCS):
                began = time.perf_counter()
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
                durations.append(time.perf_counter() - began)
    except OSError as error:
        return f"nothing can be written there ({error.strerror})", None
    return "", median(durations)


def descriptors() -> int:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def needed_ports(settings: Settings) -> tuple[list[Port], str]:
    """Return the ports that processes on this machine need, and the error in ``broker.listen`` (empty if there is
    none).

    A worker takes any free port of its range; the range is listed once, and only if none of its ports is free.
    """
    broker, gateway = settings.broker, settings.gateway
    try:
        others, wrong = resolve_own(broker.listen), ""
    except ConfigError as error:
        others, wrong = (), str(error)
    uses = _PORT_USES if others else _PORT_USES[:_NUM_LOCAL_PORTS]
    wanted = [(broker.host, broker.port + number, f"the broker's, {use}") for number, use in enumerate(uses)]
    wanted += [(host, number, f"{use} at {host}") for host in others for _, number, use in wanted[: len(uses)]]
    wanted.append((gateway.host, gateway.port, "the gateway's"))
    return [*(_check_port(*each) for each in wanted), *_data_port(settings.worker)], wrong


def _check_port(host: str, number: int, use: str) -> Port:
    error = _bind_error(host, number)
    if error is None:
        return Port(number, use, is_free=True)
    if error.errno == errno.EADDRINUSE:
        return Port(number, use, False, *_find_listener(number))
    return Port(number, use, False, bind_error=error.strerror or str(error))


def _data_port(worker: WorkerSettings) -> list[Port]:
    host = "0.0.0.0" if worker.host == "auto" else worker.host
    first, _, last = worker.data_ports.partition("-")
    if any(_bind_error(host, number) is None for number in range(int(first), int(last) + 1)):
        return []
    return [_check_port(host, int(first), f"a worker's, as all of worker.data_ports, {worker.data_ports}")]


def _bind_error(host: str, number: int) -> OSError | None:
    """Return the error of listening on this port; None if it is possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError as error:
        return error
    return None


def _find_listener(number: int) -> tuple[str, bool]:
    """Return the process that listens on this port, if the system reports it, and whether it is of the user's swarm."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == number and each.pid:
                holder = psutil.Process(each.pid)
                is_users = os.getuid() in (0, holder.uids().real) and is_swarm(holder.cmdline())
                is_units = each.pid == 1 and find_units() is not None
                return f"{holder.name()} (process {each.pid})", is_users or is_units
    return "", False


def is_swarm(command: Sequence[str]) -> bool:
    """Whether a command line is one of Swarm's processes: the program, or ``python … -m swarm``."""
    words = " ".join(command).split()[:6]
    return any(Path(word).name == "swarm" for word in words[:2]) or ("-m", "swarm") in pairwise(words)


def _kernels() -> Kernels | None:
    """Return the kernels that would be used; None where no worker can run."""
    try:
        from swarm.stage import native
    except ImportError:
        return None
    return Kernels(native.variant(), native.unavailable_reason(), native.rejected_variants(), _features())


def _features() -> tuple[str, ...]:
    """Return the processor features that this machine has and our kernels use, by the names of ``/proc/cpuinfo``."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                has = set(value.split())
                return tuple(feature for feature in _FEATURES if feature in has)
    return ()


def _gpus() -> tuple[str, ...]:
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    triton = _version("triton")
    software = [
        *([f"driver {driver}"] if (driver := _read_driver_version()) else []),
        f"torch {torch.__version__} for {built_for}",
        f"triton {triton}" if triton else "no triton: torch's kernels compute",
    ]
    gpus = []
    for index in range(torch.cuda.device_count()):
        about, free = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)[0]
        memory = f"{free / 2**30:.0f} of {about.total_memory / 2**30:.0f} GiB free"
        gpus.append(f"cuda:{index}: {about.name}, {memory}; {', '.join(software)}")
    return tuple(gpus)


def _read_driver_version(path: Path = _DRIVER_VERSION) -> str:
    """Return the version of NVIDIA's driver; empty if the kernel does not report it."""
    try:
        first = path.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if re.fullmatch(r"\d+\.\d+(\.\d+)?", word)), "")


def gpu_unused(devices: Sequence[Path] = _GPU_DEVICES) -> str:
    """Return why workers can't use the system's GPU; empty if there is none, they can, or no worker can run here."""
    device_path = next((path for path in devices if path.exists()), None)
    if device_path is None:
        return ""
    try:
        import torch
    except ImportError:
        return ""
    if torch.cuda.is_available():
        return ""
    is_without = torch.version.cuda is None and torch.version.hip is None
    reason = "is built for CPUs only" if is_without else "finds no GPU through the driver"
    return f"there is one ({device_path}), but torch {torch.__version__} {reason}"


def _clock_is_set() -> bool | None:
    if sys.platform != "linux":
        return None
    return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) != _UNSYNCHRONISED)  # zeros: a pure query


def inspect_model(name: str | None) -> ModelFacts | None:
    """Return a summary of the model's files; for a model on a hub, only small files are fetched. None where no worker
    can run."""
    try:
        from swarm.stage.model.checkpoint import Checkpoint
        from swarm.stage.model.kinds import check_folder
        from swarm.stage.model.location import locate_model
        from swarm.stage.model.text_tower import TEXT_ONLY_NOTE
    except ImportError:
        return None
    from swarm.demo import model_path

    path = str(model_path()) if name is None else name
    try:
        location = locate_model(path, lambda _: None)
        check_folder(location.folder)
        checkpoint = Checkpoint.at(location)
        if name is not None:
            with suppress(ImportError):  # The finding about packages names what is missing.
                from swarm.stage.engine.selfcheck import check_served

                check_served(location.folder, checkpoint)
        files = checkpoint.manifest(checkpoint.stored_dtype).files
        names = "".join(f"{file.name} {file.num_bytes} {file.digest}\n" for file in files)
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        missing = sum(checkpoint.missing([*checkpoint.tensors, *checkpoint.quantized]).values())
        limits = TEXT_ONLY_NOTE if checkpoint.is_text_only else ""
        return ModelFacts(path, checkpoint.num_bytes, digest=digest, missing_bytes=missing, limits=limits)
    except ModelError as error:
        return ModelFacts(path, error=str(error), is_refused=isinstance(error, UnservedModel))


def _estimate_speed(settings: Settings, workers: int) -> SpeedEstimate:
    from swarm.cli.doctor.estimate import estimate_speed, measure_machine

    try:
        return estimate_speed(settings, measure_machine(settings), workers)
    except ModelError as error:
        return SpeedEstimate(error=str(error))


def _worker_settings(settings: Settings, places: Sequence[Path]) -> Settings:
    """Return the settings with the state directory of a systemd worker's memberships, if this user may read it."""
    directories = [place for place in places[1:] if place.name == "workers" and os.access(place, os.R_OK | os.X_OK)]
    return settings.model_copy(update={"state_dir": directories[0]}) if directories else settings


def _check_connectivity(settings: Settings) -> BrokerConnectivity | None:
    """Test the connection to the broker; None if none was named and this machine has joined none as a worker."""
    from swarm.cli.doctor.connectivity import check_connectivity
    from swarm.cli.joining import resolve_worker

    try:
        named, known = resolve_worker(settings, None)
        if known is None and "url" not in settings.client.model_fields_set:
            return None
        return asyncio.run(check_connectivity(named.client.url, known.pair if known else None))
    except ConfigError as error:
        return BrokerConnectivity(
            settings.client.url, error=str(error), remedy="docs/how-to/keys.md explains how a machine joins"
        )


def readable_by_others(state: Path) -> list[str]:
    """Return a line for each key file that other users may read."""
    files = [path for pattern in _KEYS for path in state.glob(pattern)] if state.is_dir() else []
    return [f"others may read {path} (chmod 600 {path})" for path in files if path.stat().st_mode & 0o077]


def list_units(is_users: bool) -> list[SystemdUnit]:
    """Return the loaded units of the system's systemd, or of this user's."""
    try:
        rows = manager.unit_states(is_users, "--all", patience_s=_PATIENCE_S)
    except SystemdError:
        return []
    return [
        SystemdUnit(
            row.get("Id", ""),
            row.get("ActiveState", ""),
            row.get("SubState", ""),
            int(row.get("NRestarts") or 0),
            is_users,
        )
        for row in rows
    ]
