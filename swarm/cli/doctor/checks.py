"""Findings from facts about a machine: pure functions, so that tests can construct any problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from swarm.cli.output import format_bytes
from swarm.stage.shell.link_probe import MTU_REMEDY
from swarm.version import install_command
from swarm.wire.messages import MEASURABLE_BYTES_PER_S

Level = Literal["ok", "note", "trouble"]

MIN_MEMORY_BYTES: Final = 2 << 30  # bytes for torch and a small model
MIN_DISK_BYTES: Final = 1 << 30  # bytes for a journal
SLOW_SYNC_S: Final = 0.05  # every accepted request waits for one sync
MIN_DESCRIPTORS: Final = 4096  # a gateway's connections alone are more
MAX_WEIGHTS_SHARE: Final = 0.9  # share of the available memory that weights may take without a note
SLOW_ROUND_TRIP_S: Final = 0.02  # round trip above which a connection counts as slow
SLOW_BYTES_PER_S: Final = 12.5e6  # a hundred megabits per second
PROMPT_TOKENS: Final = 512  # tokens of the estimated prompt
MANY_RESTARTS: Final = 3  # automatic restarts of a unit above which they are no coincidence


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a broker, a gateway or a worker needs here."""

    number: int
    use: str
    is_free: bool  # whether it can be bound now
    holder: str = ""  # process that holds it, if known
    is_own: bool = False  # held by a process of this user's own swarm, or by systemd for the units' broker
    bind_error: str = ""  # why it can't be bound by any process, such as a foreign address


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """A systemd unit, with its state and substate in systemd's words."""

    name: str
    state: str
    sub: str = ""
    restarts: int = 0  # automatic restarts since its last manual start
    is_users: bool = False  # belongs to this user's systemd, not to the system's


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that a worker would use on this machine."""

    variant: str = ""  # the variant of our own kernels in use; empty: none
    unavailable_reason: str = ""  # why our own kernels are not used
    rejected: str = ""  # faster variants that failed their proof, with the reason
    features: tuple[str, ...] = ()  # processor features that any of our kernels uses


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's files on this machine."""

    name: str
    weight_bytes: int = 0
    error: str = ""  # why it can't be served; empty if it can
    is_refused: bool = False  # complete, but of a kind that Swarm does not serve
    digest: str = ""  # of the model's files; independent of their location
    missing_bytes: int = 0  # of the weights, to fetch from the hub
    limits: str = ""  # what of it is not served


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Estimate of a model's speed."""

    tokens_per_s: tuple[tuple[int, float], ...] = ()  # number of sequences that decode together, and the total rate
    prompt_s: float = 0.0  # time to compute a prompt of ``PROMPT_TOKENS`` tokens
    layers: tuple[int, ...] = ()  # number of layers of each worker
    needed_bytes: int = 0  # of the worker that needs most: weights, buffers, keys and values
    memory_bytes: int = 0  # memory of that worker for these
    positions: int = 0  # KV cache capacity of the plan
    error: str = ""  # why no plan is possible; empty if one is
    is_short: bool = False  # the plan lacks memory, which ``error`` names


@dataclass(frozen=True, slots=True)
class BrokerConnectivity:
    """Connection from here to a broker, on the workers' port."""

    address: str
    build: str = ""  # the broker's version
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    loses_large: bool = False  # small messages arrive, large ones are lost
    error: str = ""  # why the connection fails; empty if it works
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a machine. None: could not be determined."""

    python: tuple[int, int]
    packages: Mapping[str, str | None]  # packages that a worker needs, with their installed version
    processor: str
    cores: int
    quota: float | None  # cores that a container allows
    memory_bytes: int
    available_bytes: int
    memory_limit: int | None  # of the process's control groups
    state_dir: str
    room_bytes: int | None  # free disk space for the state
    sync_s: float | None  # duration of a small durable write
    state_wrong: str  # why the state directory can't be used; empty if it can
    descriptors: int
    ports: tuple[Port, ...]
    kernels: Kernels | None
    gpus: tuple[str, ...]
    clock_is_set: bool | None
    model: ModelFacts | None
    outlook: SpeedEstimate | None = None
    keys_wrong: tuple[str, ...] = ()  # a line for each key file that others may read
    units: tuple[SystemdUnit, ...] = ()
    reach: BrokerConnectivity | None = None  # if there is a broker to connect to
    state_is_hidden: bool = False  # not accessible to this user: writing and key files were not checked
    listen_wrong: str = ""  # what is wrong with broker.listen
    gpu_unused: str = ""  # why a GPU of this machine is not used


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. Printed as JSON by its field names."""

    about: str
    level: Level
    text: str
    remedy: str = ""


def make_findings(facts: Facts) -> list[Finding]:
    """Return all findings, in the order in which a start would run into them."""
    return [finding for check in _CHECKS for finding in check(facts)]


def _packages(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 11):
        python_version = ".".join(map(str, facts.python))
        yield Finding(
            "python", "trouble", f"this is Python {python_version}", "install Swarm with Python 3.11 or newer"
        )
    missing = [name for name, version in facts.packages.items() if version is None]
    if missing:
        text = f"a worker can't run here: {', '.join(missing)} not installed"
        yield Finding("packages", "note", text, f"{install_command('worker')}, unless only clients run here")
    else:
        yield Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in facts.packages.items()))


def _processor(facts: Facts) -> Iterator[Finding]:
    text = f"{facts.processor}, {facts.cores} cores"
    if facts.quota is not None and facts.quota < facts.cores:
        text += f", of which a container gives {facts.quota:g}"
    yield Finding("processor", "ok", text)
    if facts.kernels is None:
        return
    if not facts.kernels.variant:
        remedy = "install Swarm where there is a C compiler; until then torch computes, slower and not exact everywhere"
        yield Finding(
            "kernels", "trouble", f"Swarm's own kernels are unavailable: {facts.kernels.unavailable_reason}", remedy
        )
    elif facts.kernels.rejected:
        text = f"{facts.kernels.variant}; rejected: {facts.kernels.rejected}"
        yield Finding(
            "kernels", "note", text, "nothing: the kernels in use are exact; a faster variant failed its proof here"
        )
    else:
        has = f"; the processor has {' '.join(facts.kernels.features)}" if facts.kernels.features else ""
        yield Finding("kernels", "ok", f"Swarm's own, variant {facts.kernels.variant}{has}")


def _gpus(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        yield Finding("gpu", "ok", gpu)
    if facts.gpu_unused:
        remedy = "for workers on it: its driver (nvidia-smi or rocm-smi lists it then) and a torch that is built for it"
        yield Finding("gpu", "note", facts.gpu_unused, remedy)


def _memory(facts: Facts) -> Iterator[Finding]:
    total, free = facts.memory_bytes, facts.available_bytes
    if facts.memory_limit is not None and facts.memory_limit < total:
        total, free = facts.memory_limit, min(free, facts.memory_limit)
    text = f"{_format_size(free)} of {_format_size(total)} available"
    if total < facts.memory_bytes:
        text += f" (this machine has {_format_size(facts.memory_bytes)}, a container or unit gives less)"
    if free < MIN_MEMORY_BYTES:
        yield Finding(
            "memory",
            "trouble",
            text,
            f"a worker takes {_format_size(MIN_MEMORY_BYTES)} with a small model: stop other programs",
        )
    else:
        yield Finding("memory", "ok", text)


def _state(facts: Facts) -> Iterator[Finding]:
    if facts.state_wrong:
        yield Finding("state", "trouble", f"{facts.state_dir}: {facts.state_wrong}", "name another one (--state-dir)")
        return
    if facts.room_bytes is not None and facts.room_bytes < MIN_DISK_BYTES:
        text = f"{facts.state_dir} has {_format_size(facts.room_bytes)} free"
        yield Finding(
            "state", "trouble", text, "free disk space: a broker that can't write its journal accepts no requests"
        )
    elif facts.state_is_hidden:
        yield Finding("state", "note", f"{facts.state_dir} is not accessible to this user", "sudo swarm doctor")
    elif facts.sync_s is not None and facts.sync_s > SLOW_SYNC_S:
        text = f"a durable write to {facts.state_dir} takes {facts.sync_s * 1000:.0f} ms"
        yield Finding("state", "note", text, "every request waits for one: use a faster disk for --state-dir")
    else:
        took = "" if facts.sync_s is None else f", a durable write takes {facts.sync_s * 1000:.1f} ms"
        room = "" if facts.room_bytes is None else f" has {_format_size(facts.room_bytes)} free"
        yield Finding("state", "ok", f"{facts.state_dir}{room}{took}")


def _descriptors(facts: Facts) -> Iterator[Finding]:
    text = f"{facts.descriptors:,} open files and connections"
    if facts.descriptors < MIN_DESCRIPTORS:
        yield Finding("descriptors", "note", text, f"ulimit -n {MIN_DESCRIPTORS} before the start, for many clients")
    else:
        yield Finding("descriptors", "ok", text)


def _ports(facts: Facts) -> Iterator[Finding]:
    if facts.listen_wrong:
        yield Finding("port", "trouble", f"broker.listen: {facts.listen_wrong}", "correct the setting (or --listen)")
    own = [str(port.number) for port in facts.ports if port.is_own]
    if own:
        text = f"{', '.join(own)} in use by your running swarm; another one needs other ports (--port, --http)"
        yield Finding("port", "note", text)
    for port in facts.ports:
        if port.bind_error:
            text = f"{port.number} ({port.use}) can't be used: {port.bind_error}"
            yield Finding(
                "port", "trouble", text, "name an address of this machine (--listen), or another port (--port)"
            )
        elif not port.is_free and not port.is_own:
            text = f"{port.number} ({port.use}) is in use{f' by {port.holder}' if port.holder else ''}"
            yield Finding("port", "note", text, "stop that process, or choose another port (--port)")
    if all(port.is_free for port in facts.ports) and facts.ports:
        numbers = dict.fromkeys(str(port.number) for port in facts.ports)
        yield Finding("port", "ok", f"{', '.join(numbers)} are free")


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.clock_is_set is False:
        text = "the clock is not synchronised"
        yield Finding(
            "clock", "note", text, "run a time service: expiry of invitations and keys, and logs, depend on the clock"
        )
    elif facts.clock_is_set:
        yield Finding("clock", "ok", "synchronised")


def _model(facts: Facts) -> Iterator[Finding]:
    if facts.model is None:
        return
    if facts.model.error:
        remedy = "choose another one" if facts.model.is_refused else "choose another one, or fetch it again"
        yield Finding("model", "trouble", facts.model.error, remedy)
        return
    text = f"{facts.model.name}, {_format_size(facts.model.weight_bytes)} of weights"
    if facts.model.missing_bytes:
        text += f" ({_format_size(facts.model.missing_bytes)} to fetch from the hub)"
    if facts.model.digest:
        text += f", files {facts.model.digest}"
    if facts.model.limits:
        text += f", {facts.model.limits}"
    limit = min(facts.available_bytes, facts.memory_limit or facts.available_bytes)
    is_short = facts.outlook is not None and facts.outlook.is_short  # reported as the outlook
    if facts.model.weight_bytes > MAX_WEIGHTS_SHARE * limit and not is_short:
        text += f", more than is available here ({_format_size(limit)})"
        yield Finding(
            "model", "note", text, "other machines must hold a part of it: swarm up --listen, swarmctl invite"
        )
    else:
        yield Finding("model", "ok", text)


def _outlook(facts: Facts) -> Iterator[Finding]:
    estimate = facts.outlook
    if estimate is None:
        return
    if estimate.error:
        remedy = "free memory, or let other machines hold a part: swarm up --listen, swarmctl invite"
        yield Finding(
            "outlook",
            "trouble",
            f"no plan: {estimate.error}",
            remedy if estimate.is_short else "choose another model, or another worker.dtype",
        )
        return
    rates = ", ".join(f"{rows}: {_format_rate(rate)} tokens/s" for rows, rate in estimate.tokens_per_s)
    shares = " + ".join(map(str, estimate.layers))
    text = f"with {shares} layers, by sequences that decode together: {rates}; "
    yield Finding("outlook", "ok", f"{text}a prompt of {PROMPT_TOKENS} tokens takes {estimate.prompt_s:.3g} s")
    if estimate.needed_bytes:
        needed, available = _format_size(estimate.needed_bytes), _format_size(estimate.memory_bytes)
        text = f"a worker needs up to {needed} of the {available} that it has for the"
        yield Finding(
            "room", "ok", f"{text} model; there is memory for the keys and values of {estimate.positions:,} positions"
        )


def _keys(facts: Facts) -> Iterator[Finding]:
    for problem in facts.keys_wrong:
        yield Finding("keys", "trouble", problem, "others may have read it: replace it (swarmctl keys rotate)")


def _reach(facts: Facts) -> Iterator[Finding]:
    connectivity = facts.reach
    if connectivity is None:
        return
    if connectivity.error:
        yield Finding("broker", "trouble", f"{connectivity.address}: {connectivity.error}", connectivity.remedy)
        return
    if connectivity.loses_large:
        text = f"{connectivity.address}: small messages come back, large ones get lost"
        yield Finding("broker", "trouble", text, MTU_REMEDY)
        return
    connection = describe_connection(connectivity.round_trip_s, connectivity.bytes_per_s)
    text = f"{connectivity.address}, swarm {connectivity.build}: {connection}"
    remedy = connection_remedy(connectivity.round_trip_s, connectivity.bytes_per_s)
    yield Finding("broker", "note" if remedy else "ok", text, remedy)


def describe_connection(round_trip_s: float, bytes_per_s: float, *, is_lower_bound: bool = False) -> str:
    """Describe a measured connection in words. ``is_lower_bound``: it was never tested to its limit."""
    quick = bytes_per_s > MEASURABLE_BYTES_PER_S
    least = "at least " if is_lower_bound else ""
    rate = "throughput too high to measure" if quick else f"{least}{format_bytes(bytes_per_s)} a second"
    return f"{round_trip_s * 1000:.3g} ms there and back, {rate}"


def connection_remedy(round_trip_s: float, bytes_per_s: float) -> str:
    """Return the remedy for a slow connection; empty if it is fast enough."""
    remedies = []
    if round_trip_s > SLOW_ROUND_TRIP_S:
        remedies.append("steps wait for it (swarmctl plan shows how long): use a nearer machine")
    if 0 < bytes_per_s < SLOW_BYTES_PER_S:
        remedies.append(
            "use a faster network; if small messages are fast and large ones very slow, check the MTU on the path"
        )
    return "; ".join(remedies)


def _units(facts: Facts) -> Iterator[Finding]:
    for unit in facts.units:
        log = f"journalctl{' --user' if unit.is_users else ''} -u {unit.name} -n 50"
        is_often = unit.restarts >= MANY_RESTARTS
        text = f"{unit.name} is {unit.state}" + (f" ({unit.sub})" if unit.sub else "")
        if unit.restarts:
            text += f", and was restarted {'once' if unit.restarts == 1 else f'{unit.restarts} times'}"
        if unit.state == "failed":
            yield Finding("systemd", "trouble", f"{unit.name} has failed", log)
        elif unit.sub.startswith("auto-restart") or (is_often and unit.state == "activating"):
            yield Finding("systemd", "trouble", text, log)
        elif is_often and unit.state == "active":
            yield Finding("systemd", "note", text, f"nothing if those were upgrades; else {log}")
        else:
            yield Finding("systemd", "ok", text)


def _format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"


_CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    _packages,
    _processor,
    _gpus,
    _memory,
    _state,
    _descriptors,
    _ports,
    _clock,
    _model,
    _outlook,
    _keys,
    _units,
    _reach,
)
