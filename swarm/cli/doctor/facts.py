"""Ask the machine: each question by itself, so that one that can't be answered leaves the others as they are."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Final

import psutil

from swarm.cli.about.packages import FOR_MODELS
from swarm.cli.doctor.checks import Facts, Kernels, Model, Outlook, Port, Reach, Unit
from swarm.cli.doctor.places import state_dirs
from swarm.cli.systemd import manager
from swarm.cli.systemd.files import Failed
from swarm.errors import ConfigError, ModelError
from swarm.wire.addresses import own

if TYPE_CHECKING:
    from swarm.config import Settings, WorkerSettings

_KEYS: Final = ("broker.key", "keys.json", "roll.json", "joined/*.json")
_FEATURES: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_TIME_ERROR: Final = 5  # adjtimex: nobody keeps the clock right
_NUM_SYNCS: Final = 3
_PATIENCE_S: Final = 5.0
_GPU_DEVICES: Final = (Path("/dev/nvidia0"), Path("/dev/kfd"))
_DOORS: Final = ("for clients", "for workers", "for beats", "for finished steps", "for the relay")
_OWN_DOORS: Final = 2  # where no other machine is served, the rest is wherever there is room


def gather(settings: Settings, workers: int = 0, *, is_of_units: bool = False) -> Facts:
    """All of it, within a few seconds. ``settings``: what a swarm started here would have. ``workers``: tell how fast
    so many would be; 0: don't measure that. ``is_of_units``: its state is another user's, who may look into it."""
    from swarm.lock.known import default_state_dir
    from swarm.stage.engine import quota

    places = state_dirs(settings.state_dir or default_state_dir())
    state = places[:2][-1]
    is_hidden = is_of_units and not os.access(_existing(state), os.W_OK)
    wrong, sync_s = ("", None) if is_hidden else written(state)
    doors, listen_wrong = ports(settings)
    memory, found = psutil.virtual_memory(), model(settings.model)
    return Facts(
        python=sys.version_info[:2],
        packages={name: _version(name) for name in FOR_MODELS},
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
        state_is_hidden=is_hidden,
        descriptors=descriptors(),
        ports=tuple(doors),
        listen_wrong=listen_wrong,
        kernels=_kernels(),
        gpus=_gpus(),
        gpu_unused=gpu_unused(),
        clock_is_set=_clock_is_set(),
        model=found,
        outlook=_outlook(settings, workers) if workers and found is not None and not found.wrong else None,
        keys_wrong=tuple(wrong for place in places for wrong in readable_by_others(place)),
        units=tuple(unit for is_users in (False, True) for unit in units(is_users)),
        reach=_reach(_as_worker(settings, places)),
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
    return next(each for each in (path, *path.absolute().parents) if os.path.exists(each))


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


def ports(settings: Settings) -> tuple[list[Port], str]:
    """Those that are wanted here, and what is wrong with ``broker.listen``, if anything is. Of the many that a worker
    may take one of, there is one if none is free."""
    broker, gateway = settings.broker, settings.gateway
    try:
        others, wrong = own(broker.listen), ""
    except ConfigError as error:
        others, wrong = (), str(error)
    uses = _DOORS if others else _DOORS[:_OWN_DOORS]
    wanted = [(broker.host, broker.port + number, f"the broker's, {use}") for number, use in enumerate(uses)]
    wanted += [(host, number, f"{use} at {host}") for host in others for _, number, use in wanted[: len(uses)]]
    wanted.append((gateway.host, gateway.port, "the gateway's"))
    return [*(_port(*each) for each in wanted), *_data_port(settings.worker)], wrong


def _port(host: str, number: int, use: str) -> Port:
    wrong = _refusal(host, number)
    if wrong is None:
        return Port(number, use, is_free=True)
    if wrong.errno == errno.EADDRINUSE:
        return Port(number, use, False, _listener(number))
    return Port(number, use, False, refused=wrong.strerror or str(wrong))


def _data_port(worker: WorkerSettings) -> list[Port]:
    host = "0.0.0.0" if worker.host == "auto" else worker.host
    first, _, last = worker.data_ports.partition("-")
    if any(_refusal(host, number) is None for number in range(int(first), int(last) + 1)):
        return []
    return [_port(host, int(first), f"a worker's, as all of worker.data_ports, {worker.data_ports}")]


def _refusal(host: str, number: int) -> OSError | None:
    """Why nobody can listen there; None: one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError as error:
        return error
    return None


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


def gpu_unused(devices: Sequence[Path] = _GPU_DEVICES) -> str:
    """Why workers can't use a GPU that the system has; empty: it has none, they can, or none can run here anyway."""
    found = next((path for path in devices if path.exists()), None)
    if found is None:
        return ""
    try:
        import torch
    except ImportError:
        return ""
    if torch.cuda.is_available():
        return ""
    is_without = torch.version.cuda is None and torch.version.hip is None
    why = "is a build for processors alone" if is_without else "finds no GPU by the driver"
    return f"there is one ({found}), and torch {torch.__version__} {why}"


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


def _as_worker(settings: Settings, places: Sequence[Path]) -> Settings:
    """With the state directory in which a worker of systemd's keeps what it joined, if this user may look into it."""
    found = [place for place in places[1:] if place.name == "workers" and os.access(place, os.R_OK | os.X_OK)]
    return settings.model_copy(update={"state_dir": found[0]}) if found else settings


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
        return Reach(
            settings.client.url, wrong=str(error), remedy="docs/tutorial/two-machines.md shows how a machine joins"
        )


def readable_by_others(state: Path) -> list[str]:
    """Files of keys that somebody else may read."""
    found = [path for pattern in _KEYS for path in state.glob(pattern)] if state.is_dir() else []
    return [f"others may read {path} (chmod 600 {path})" for path in found if path.stat().st_mode & 0o077]


def units(is_users: bool) -> list[Unit]:
    """Those that are loaded, of the system's systemd or of this user's."""
    try:
        rows = manager.how_they_are(is_users, "--all", patience_s=_PATIENCE_S)
    except Failed:
        return []
    return [
        Unit(
            row.get("Id", ""),
            row.get("ActiveState", ""),
            row.get("SubState", ""),
            int(row.get("NRestarts") or 0),
            is_users,
        )
        for row in rows
    ]
