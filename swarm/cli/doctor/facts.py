"""Ask the machine: each question by itself, so that one that can't be answered leaves the others as they are."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Final

import psutil

from swarm.cli.doctor.checks import Facts, Kernels, Model, Outlook, Port, Reach
from swarm.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from swarm.config import Settings

PACKAGES: Final = ("torch", "transformers", "safetensors", "huggingface_hub")
_KEYS: Final = ("broker.key", "keys.json", "roll.json", "joined/*.json")
_FEATURES: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_TIME_ERROR: Final = 5  # adjtimex: nobody keeps the clock right
_NUM_SYNCS: Final = 3
_PATIENCE_S: Final = 5.0


def gather(settings: Settings, workers: int = 0) -> Facts:
    """All of it, within a few seconds. ``settings``: what a swarm started here would have. ``workers``: tell how fast
    so many would be; 0: don't measure that."""
    from swarm.lock.known import default_state_dir
    from swarm.stage.engine import quota

    state = settings.state_dir or default_state_dir()
    wrong, sync_s = written(state)
    memory, found = psutil.virtual_memory(), model(settings.model)
    return Facts(
        python=sys.version_info[:2],
        packages={name: _version(name) for name in PACKAGES},
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=quota.cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        memory_limit=memory_limit(),
        state_dir=str(state),
        room_bytes=None if wrong else shutil.disk_usage(_existing(state)).free,
        sync_s=sync_s,
        state_wrong=wrong,
        descriptors=descriptors(),
        ports=tuple(ports(settings)),
        kernels=_kernels(),
        gpus=_gpus(),
        clock_is_set=_clock_is_set(),
        model=found,
        outlook=_outlook(settings, workers) if workers and found is not None and not found.wrong else None,
        keys_wrong=tuple(readable_by_others(state)),
        units=_units(),
        reach=_reach(settings),
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
    """The least limit of this process's control groups and of those around them; None if there is none."""
    try:
        lines = listing.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            with suppress(OSError, ValueError):  # "max" is no number
                found.append(int((root.joinpath(*parts[:depth]) / name).read_text("ascii")))
    return min(found, default=None)


def _existing(path: Path) -> Path:
    """The directory, or the one in which it would be made."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def written(state: Path) -> tuple[str, float | None]:
    """Why nothing can be kept there, or how long it takes until a small write is safe."""
    folder = _existing(state)
    taken: list[float] = []
    try:
        with NamedTemporaryFile(dir=folder, prefix=".swarm-doctor-") as file:
            for _ in range(_NUM_SYNCS):
                began = time.perf_counter()
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - began)
    except OSError as error:
        return f"nothing can be written there ({error.strerror})", None
    return "", median(taken)


def descriptors() -> int:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def ports(settings: Settings) -> list[Port]:
    broker, gateway = settings.broker, settings.gateway
    wanted = [
        (broker.host, broker.port, "the broker's, for clients"),
        (broker.host, broker.port + 1, "the broker's, for workers"),
        (gateway.host, gateway.port, "the gateway's"),
    ]
    found = []
    for host, number, use in wanted:
        is_free = _is_free(host, number)
        found.append(Port(number, use, is_free, "" if is_free else _listener(number)))
    return found


def _is_free(host: str, number: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError:
            return False
    return True


def _listener(number: int) -> str:
    """Whose it is, if the system tells us."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == number and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def _kernels() -> Kernels | None:
    """None where no worker can run."""
    try:
        from swarm.stage import native
    except ImportError:
        return None
    return Kernels(native.variant(), native.absence(), native.passed_over(), _features())


def _features() -> tuple[str, ...]:
    """Those of the processor that some kernel of ours is for, by the system's names."""
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
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index}: {about.name}, {about.total_memory / 2**30:.0f} GiB")
    return tuple(found)


def _clock_is_set() -> bool | None:
    if sys.platform != "linux":
        return None
    return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) != _TIME_ERROR)  # zeros: only asks


def model(name: str | None) -> Model | None:
    """Read what its files say of themselves; of one on a hub, the small files alone. None where no worker can run."""
    try:
        from swarm.stage.model.checkpoint import Checkpoint, resolve
    except ImportError:
        return None
    from swarm.demo import model_path

    said = str(model_path()) if name is None else name
    try:
        place = resolve(said, lambda _: None)
        checkpoint = Checkpoint(place.folder, place.remote)
        files = checkpoint.manifest(checkpoint.stored_dtype).files
        names = "".join(f"{file.name} {file.num_bytes} {file.digest}\n" for file in files)
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        return Model(said, sum(tensor.num_bytes for tensor in checkpoint.tensors.values()), digest=digest)
    except ModelError as error:
        return Model(said, wrong=str(error))


def _outlook(settings: Settings, workers: int) -> Outlook:
    from swarm.cli.doctor.outlook import measured, outlook

    try:
        return outlook(settings, measured(settings), workers)
    except ModelError as error:
        return Outlook(wrong=str(error))


def _reach(settings: Settings) -> Reach | None:
    """None: no broker was named, and this machine has joined none as a worker."""
    from swarm.cli.doctor.reach import reach
    from swarm.cli.joining import of_worker

    try:
        named, known = of_worker(settings, None)
        if known is None and "url" not in settings.client.model_fields_set:
            return None
        return asyncio.run(reach(named.client.url, known.pair if known else None))
    except ConfigError as error:
        return Reach(settings.client.url, wrong=str(error), remedy="docs/hosts.md tells how a machine joins")


def readable_by_others(state: Path) -> list[str]:
    """Files of keys that somebody else may read."""
    found = [path for pattern in _KEYS for path in state.glob(pattern)] if state.is_dir() else []
    return [f"others may read {path} (chmod 600 {path})" for path in found if path.stat().st_mode & 0o077]


def _units() -> dict[str, str]:
    command = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "swarm-*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: row[2] for row in rows if len(row) >= 3}
