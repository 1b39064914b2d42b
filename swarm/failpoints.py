"""Fault injection for tests: named places where this process can be made to die, hang, raise, stall or compute wrongly.

Faults are enabled only by the environment, when a service starts (``arm``). Disabled, a place costs one lookup of a
module attribute::

    if failpoints.armed:
        failpoints.hit("step.sampled")

``SWARM_FAILPOINTS`` holds faults separated by commas, each ``PLACE[CONDITION]=ACTION:ARGUMENT@COUNT``::

    step.sampled=kill@12                   the 12th time, the process ends as by SIGKILL
    order.replay=hang                      the first time, the thread blocks for ever
    step.computes[token=7]=kill            the first time that a batch has token id 7 (or: sequence=3, part=4)
    loop.turn=stall:3@20                   the 20th time, the thread sleeps for 3 seconds
    beat.due=stall:0.2@5+                  from the 5th time on, each time
    step.computed=nan@4                    the 4th time, the hidden states become NaN
    advertise=port:-10000                  the data endpoint is advertised with another port, that of a test proxy

``SWARM_FAILPOINTS_TRACE`` names a file to which each injected fault is appended: process, place, action, how often the
place had been reached, and when (monotonic clock). ``SWARM_FAILPOINTS_FROM`` names a file that is created later: until
it exists, places do nothing and are not counted.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from swarm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VARIABLE = "SWARM_FAILPOINTS"
TRACE_VARIABLE = "SWARM_FAILPOINTS_TRACE"
FROM_VARIABLE = "SWARM_FAILPOINTS_FROM"

PLACES: dict[str, str] = {
    "step.arrived": "a step arrived on the data edge",
    "step.computes": "a step's rows are about to be computed",
    "step.prefill": "the same, and some rows belong to a prompt: a chunk",
    "step.computed": "computed, but neither logged nor sent (values)",
    "step.sampled": "the last stage sampled tokens or computed vectors, but has not sent them",
    "step.sent": "a step's result was handed to the socket",
    "step.proposes": "the same, if the step has proposed tokens and the stage is not the last",
    "replay.begins": "a chunk of a replay is about to be computed",
    "replay.computed": "a chunk of a replay was computed, but neither logged nor reported (values)",
    "replay.sent": "a chunk of a replay was handed to the socket",
    "load.tensor": "a tensor was read",
    "load.done": "everything is loaded and warm, but not reported",
    "loop.turn": "the control loop measures its lag, every 0.1 s",
    "beat.due": "a heartbeat is about to be sent",
    "advertise": "the data endpoint is advertised (text)",
    "broker.tick": "the broker's timer",
    "gateway.turn": "the gateway's event loop measures its lag, every 0.1 s",
    "journal.writes": "the journal's thread is about to write queued facts",
    "journal.written": "they are written, but not reported",
    "broker.dispatch": "a step is about to be sent to the first stage",
    "broker.proposes": "a step with proposed tokens was sent to the first stage",
    "broker.step_done": "the last stage's answer arrived, but is not handled",
    "broker.order": "an order to a worker is about to be sent",
    "broker.tokens": "tokens are about to be written to the journal",
    "broker.advertise": "the endpoints for heartbeats and finished steps are advertised (text)",
}
for _order in ("prepare", "fence", "activate", "replay", "dismiss", "release"):
    PLACES[f"order.{_order}"] = f"an order to {_order} reached the compute thread"
    PLACES[f"handled.{_order}"] = f"an order to {_order} was carried out"
for _news in ("hello", "prepared", "activated", "replaydone", "leaving"):
    PLACES[f"tell.{_news}"] = f"about to be sent to the broker: {_news}"
    PLACES[f"told.{_news}"] = f"handed to the socket: {_news}"

# Places that pass hidden states, which can be falsified.
VALUE_PLACES = frozenset({"step.computed", "replay.computed"})
ENDPOINT_PLACES = frozenset({"advertise", "broker.advertise"})  # Places that pass an endpoint.
_FAULT = re.compile(r"([\w.]+)(?:\[(token|sequence|part)=(\d+)\])?=(\w+)(?::(-?[\d.]+))?(?:@(\d+)(\+?))?")


@dataclass(slots=True)
class _Fault:
    """One fault: its place, condition, action, and the visits at which it happens."""

    place: str
    fact: str  # "token", "sequence" or "part"; empty: unconditional.
    value: int
    action: str
    argument: float
    count: int
    repeats: bool  # Whether it happens at every later visit, too.
    visits: int = field(default=0)  # Visits so far.

    def is_due(self, facts: Mapping[str, Collection[int]]) -> bool:
        """Count this visit. Return whether the fault happens now."""
        if self.fact and self.value not in facts.get(self.fact, ()):
            return False
        self.visits += 1
        return self.visits == self.count or (self.repeats and self.visits > self.count)


armed: dict[str, list[_Fault]] | None = None  # Faults by place; None when fault injection is off.
_trace: str = ""
_start_file: str = ""  # File that must exist before anything counts.
_lock = threading.Lock()  # Several threads reach places.


def arm(environment: Mapping[str, str]) -> None:
    """Enable the faults in the environment. Raises ConfigError if they can't be parsed."""
    # Intended: places check a single module attribute.
    global armed, _trace, _start_file  # noqa: PLW0603  (the point of it: nothing but a name to look at)
    spec, _trace = environment.get(VARIABLE, "").strip(), environment.get(TRACE_VARIABLE, "")
    _start_file = environment.get(FROM_VARIABLE, "")
    faults: dict[str, list[_Fault]] = {}
    for text in filter(None, (part.strip() for part in spec.split(","))):
        fault = _parse(text)
        faults.setdefault(fault.place, []).append(fault)
    armed = faults or None


def hit(place: str, **facts: Collection[int]) -> None:
    """Inject the faults that are due at this place; usually none."""
    for fault in _take_due(place, facts):
        _ACTIONS[fault.action](fault)


def falsified_values(place: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values, falsified if that is due here; injects other faults, too."""
    for fault in _take_due(place, {}):
        if fault.action in _FALSIFIERS:
            values = _FALSIFIERS[fault.action](values.copy())
        else:
            _ACTIONS[fault.action](fault)
    return values


def advertised_endpoint(place: str, endpoint: str) -> str:
    """Return the endpoint to advertise, with another port if that is due."""
    for fault in _take_due(place, {}):
        host, _, port = endpoint.rpartition(":")
        endpoint = f"{host}:{int(port) + int(fault.argument)}"
    return endpoint


def _take_due(place: str, facts: Mapping[str, Collection[int]]) -> list[_Fault]:
    faults = (armed or {}).get(place)
    if faults is None or (_start_file and not os.path.exists(_start_file)):
        return []
    with _lock:
        due = [fault for fault in faults if fault.is_due(facts)]
    for fault in due:
        _record(fault)
    return due


def _record(fault: _Fault) -> None:
    if _trace:
        line = f"{os.getpid()} {fault.place} {fault.action} {fault.visits} {time.monotonic():.6f}\n"
        with open(_trace, "ab", buffering=0) as file:
            file.write(line.encode())


def _parse(text: str) -> _Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise _parse_error(text, "write it as PLACE[token=ID]=ACTION:ARGUMENT@COUNT, for example step.sampled=kill@12")
    place, about, value, action, argument, count, more = match.groups()
    if place not in PLACES:
        raise _parse_error(text, f"there is no place {place!r}; the places are {', '.join(sorted(PLACES))}")
    allowed = (
        {"port"} if place in ENDPOINT_PLACES else set(_ACTIONS) | (set(_FALSIFIERS) if place in VALUE_PLACES else set())
    )
    if action not in allowed:
        raise _parse_error(text, f"the actions there are {', '.join(sorted(allowed))}")
    if (argument is None) == (action in _NEEDS_ARGUMENT):
        what = "a number, like stall:3" if argument is None else "no number"
        raise _parse_error(text, f"{action} takes {what}")
    goes_on = bool(more) or action == "port"
    return _Fault(place, about or "", int(value or 0), action, float(argument or 0), int(count or 1), goes_on)


def _parse_error(text: str, why: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {text!r} can't be parsed: {why}")


# --- actions ---------------------------------------------------------------------------------------------------------


def _kill(_: _Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: _Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate(_: _Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _exit(_: _Fault) -> NoReturn:
    os._exit(1)


def _abort(_: _Fault) -> NoReturn:
    os.abort()


def _segfault(_: _Fault) -> None:
    sys.stderr.flush()
    ctypes.string_at(0)


def _hang(_: _Fault) -> None:
    time.sleep(1e9)


def _stall(fault: _Fault) -> None:
    time.sleep(fault.argument)


def _raise(fault: _Fault) -> NoReturn:
    raise RuntimeError(f"an injected fault at {fault.place}")


def _memory(_: _Fault) -> NoReturn:
    raise MemoryError("an injected fault: no memory")


def _fill_memory(fault: _Fault) -> NoReturn:
    """Allocate and write this many MiB at most, then raise MemoryError."""
    taken = [bytearray(b"x" * (1 << 20)) for _ in range(int(fault.argument))]
    raise MemoryError(f"an injected fault: {len(taken)} MiB")


def _nan(values: NDArray[np.float32]) -> NDArray[np.float32]:
    values[-1, 0] = float("nan")
    return values


def _wrong_value(values: NDArray[np.float32]) -> NDArray[np.float32]:
    values[-1] = -values[-1]
    return values


_ACTIONS: dict[str, Callable[[_Fault], None]] = {
    "kill": _kill,
    "stop": _stop,
    "terminate": _terminate,
    "exit": _exit,
    "abort": _abort,
    "segfault": _segfault,
    "hang": _hang,
    "stall": _stall,
    "raise": _raise,
    "memory": _memory,
    "devour": _fill_memory,
}
_FALSIFIERS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {"nan": _nan, "wrong": _wrong_value}
_NEEDS_ARGUMENT = frozenset({"stall", "devour", "port"})
