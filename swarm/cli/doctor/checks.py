"""From facts about a machine to findings: pure, so that tests make the trouble that they want."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Level = Literal["ok", "note", "trouble"]

LEAST_MEMORY: Final = 2 << 30  # torch and a small model
LEAST_ROOM: Final = 1 << 30  # for a journal
SLOW_SYNC_S: Final = 0.05  # each accepted request waits for one
LEAST_DESCRIPTORS: Final = 4096  # a gateway's connections alone are more
PART_OF_MEMORY: Final = 0.9
PROMPT: Final = 512  # tokens


@dataclass(frozen=True, slots=True)
class Port:
    """One that a broker or a gateway wants here. ``by``: who has it, as far as that can be told."""

    number: int
    use: str
    is_free: bool
    by: str = ""


@dataclass(frozen=True, slots=True)
class Kernels:
    """``quickest``: the variant of our own kernels that computes; empty: none, and ``absence`` says why."""

    quickest: str = ""
    absence: str = ""
    passed_over: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """``wrong``: why it can't be served; empty: it can."""

    name: str
    weight_bytes: int = 0
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How fast a model would be. ``tokens_per_s``: of all sequences together, by how many decode. ``prompt_s``: until a
    prompt of ``PROMPT`` tokens is computed. ``layers``: how many each worker gets. ``wrong``: why there is no plan;
    empty: there is one."""

    tokens_per_s: tuple[tuple[int, float], ...] = ()
    prompt_s: float = 0.0
    layers: tuple[int, ...] = ()
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a machine. None: it could not be found out."""

    python: tuple[int, int]
    packages: Mapping[str, str | None]  # what a worker needs, with the version that is installed
    processor: str
    cores: int
    quota: float | None
    memory_bytes: int
    available_bytes: int
    memory_limit: int | None
    state_dir: str
    room_bytes: int | None
    sync_s: float | None
    state_wrong: str
    descriptors: int
    ports: tuple[Port, ...]
    kernels: Kernels | None
    gpus: tuple[str, ...]
    clock_is_set: bool | None
    model: Model | None
    outlook: Outlook | None = None
    keys_wrong: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)  # of systemd, with their state


@dataclass(frozen=True, slots=True)
class Finding:
    about: str
    level: Level
    text: str
    remedy: str = ""


def findings(facts: Facts) -> list[Finding]:
    """In the order in which a start would trip over them."""
    return [finding for check in _CHECKS for finding in check(facts)]


def _packages(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 11):
        found = ".".join(map(str, facts.python))
        yield Finding("python", "trouble", f"this is Python {found}", "install Swarm with Python 3.11 or newer")
    missing = [name for name, version in facts.packages.items() if version is None]
    if missing:
        text = f"a worker can't run here: {', '.join(missing)} not installed"
        yield Finding("packages", "note", text, "pip install 'swarm[worker]', unless only clients run here")
    else:
        yield Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in facts.packages.items()))


def _processor(facts: Facts) -> Iterator[Finding]:
    text = f"{facts.processor}, {facts.cores} cores"
    if facts.quota is not None and facts.quota < facts.cores:
        text += f", of which a container gives {facts.quota:g}"
    yield Finding("processor", "ok", text)
    if facts.kernels is None:
        return
    if not facts.kernels.quickest:
        remedy = "install Swarm where there is a C compiler; until then torch computes, slower and not exact everywhere"
        yield Finding("kernels", "trouble", f"Swarm's own can't be had: {facts.kernels.absence}", remedy)
    elif facts.kernels.passed_over:
        text = f"{facts.kernels.quickest}; passed over: {facts.kernels.passed_over}"
        yield Finding(
            "kernels", "note", text, "nothing: what computes is exact; a quicker variant failed its proof here"
        )
    else:
        yield Finding("kernels", "ok", f"Swarm's own, variant {facts.kernels.quickest}")


def _gpus(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        yield Finding("gpu", "ok", gpu)


def _memory(facts: Facts) -> Iterator[Finding]:
    total, free = facts.memory_bytes, facts.available_bytes
    if facts.memory_limit is not None and facts.memory_limit < total:
        total, free = facts.memory_limit, min(free, facts.memory_limit)
    text = f"{_size(free)} of {_size(total)} available"
    if total < facts.memory_bytes:
        text += f" (this machine has {_size(facts.memory_bytes)}, a container or unit gives less)"
    if free < LEAST_MEMORY:
        yield Finding(
            "memory", "trouble", text, f"a worker takes {_size(LEAST_MEMORY)} with a small model: end something"
        )
    else:
        yield Finding("memory", "ok", text)


def _state(facts: Facts) -> Iterator[Finding]:
    if facts.state_wrong:
        yield Finding("state", "trouble", f"{facts.state_dir}: {facts.state_wrong}", "name another one (--state-dir)")
        return
    if facts.room_bytes is not None and facts.room_bytes < LEAST_ROOM:
        text = f"{facts.state_dir} has room for {_size(facts.room_bytes)}"
        yield Finding("state", "trouble", text, "make room: a broker whose journal can't be written takes no requests")
    elif facts.sync_s is not None and facts.sync_s > SLOW_SYNC_S:
        text = f"a write to {facts.state_dir} takes {facts.sync_s * 1000:.0f} ms to be safe"
        yield Finding("state", "note", text, "each request waits for one: a quicker disk for --state-dir")
    else:
        took = "" if facts.sync_s is None else f", a write is safe after {facts.sync_s * 1000:.1f} ms"
        room = "" if facts.room_bytes is None else f" has room for {_size(facts.room_bytes)}"
        yield Finding("state", "ok", f"{facts.state_dir}{room}{took}")


def _descriptors(facts: Facts) -> Iterator[Finding]:
    text = f"{facts.descriptors:,} files and connections at once"
    if facts.descriptors < LEAST_DESCRIPTORS:
        yield Finding("descriptors", "note", text, f"ulimit -n {LEAST_DESCRIPTORS} before the start, for many clients")
    else:
        yield Finding("descriptors", "ok", text)


def _ports(facts: Facts) -> Iterator[Finding]:
    for port in facts.ports:
        if not port.is_free:
            text = f"{port.number} ({port.use}) is in use{f' by {port.by}' if port.by else ''}"
            yield Finding("port", "note", text, "fine if that is your swarm; else stop it, or choose another (--port)")
    if all(port.is_free for port in facts.ports) and facts.ports:
        yield Finding("port", "ok", f"{', '.join(str(port.number) for port in facts.ports)} are free")


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.clock_is_set is False:
        text = "the clock is not kept right by anything"
        yield Finding(
            "clock", "note", text, "run a time service: invitations and keys expire by it, logs are told by it"
        )
    elif facts.clock_is_set:
        yield Finding("clock", "ok", "kept right")


def _model(facts: Facts) -> Iterator[Finding]:
    if facts.model is None:
        return
    if facts.model.wrong:
        yield Finding("model", "trouble", facts.model.wrong, "name another one, or fetch it again")
        return
    text = f"{facts.model.name}, {_size(facts.model.weight_bytes)} of weights"
    limit = min(facts.available_bytes, facts.memory_limit or facts.available_bytes)
    if facts.model.weight_bytes > PART_OF_MEMORY * limit:
        text += f", more than is available here ({_size(limit)})"
        yield Finding(
            "model", "note", text, "other machines must hold a part of it: swarm up --listen, swarmctl invite"
        )
    else:
        yield Finding("model", "ok", text)


def _outlook(facts: Facts) -> Iterator[Finding]:
    found = facts.outlook
    if found is None:
        return
    if found.wrong:
        yield Finding(
            "outlook", "trouble", f"no plan: it waits for {found.wrong}", "give it more memory, or more machines"
        )
        return
    rates = ", ".join(f"{rows}: {rate:.3g}" for rows, rate in found.tokens_per_s)
    shares = " + ".join(map(str, found.layers))
    text = f"with {shares} layers, tokens/s by sequences that decode together: {rates}; "
    yield Finding("outlook", "ok", f"{text}a prompt of {PROMPT} tokens takes {found.prompt_s:.2g} s")


def _keys(facts: Facts) -> Iterator[Finding]:
    for wrong in facts.keys_wrong:
        yield Finding("keys", "trouble", wrong, "others may have read it: make a new one (swarmctl keys rotate)")


def _units(facts: Facts) -> Iterator[Finding]:
    for unit, state in facts.units.items():
        if state == "failed":
            yield Finding("systemd", "trouble", f"{unit} has failed", f"journalctl -u {unit} -n 50")
        else:
            yield Finding("systemd", "ok", f"{unit} is {state}")


def _size(num_bytes: int) -> str:
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
)
