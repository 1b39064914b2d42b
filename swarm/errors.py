"""Every exception that Swarm raises.

    SwarmError
    ├── ConfigError            the settings are wrong: names the key, the value and the remedy
    ├── ModelError             a model can't be used: names the file or the part, and why
    │   └── StageSetError      a set of layer ranges is not a pipeline (``kind`` says which rule it breaks)
    ├── JournalError           the journal can't be opened, read or written: names the file and the remedy
    ├── DeviceError            a device computes something else than it should: names what differs
    ├── WireError              bytes from a peer can't be understood: names the field
    │   └── ForeignMessage      they came whole, but say what has no meaning here: the peer is of another build
    ├── IllegalMove            a core was asked for something its rules forbid: a bug, with its story
    └── ClientError            what a caller of the client library can meet
        ├── InvalidRequest     the request is wrong; nothing was started
        ├── Overloaded         the queue is full; ``retry_after_s`` says when to come back
        ├── Unavailable        no broker answers, or it went away and did not come back
        ├── RequestFailed      the swarm accepted the request and could not finish it
        │   └── DeadlinePassed  its ``deadline_s`` passed, or could not be kept any more
        ├── RequestCancelled   somebody cancelled it
        ├── ReadElsewhere      another client reads the request now; it goes on
        └── RequestTimeout     the caller's own time limit passed

``hint_status`` is the HTTP status a gateway would answer with; it also says whose fault it
is: 4xx the caller's, 5xx ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SwarmError(Exception):
    """The root of the tree. Its text is one clear sentence, fit to be shown to a person."""

    hint_status = 500


class ConfigError(SwarmError):
    """A setting is wrong."""

    hint_status = 400


class ModelError(SwarmError):
    """A model, or a part of it, can't be used."""


class StageSetError(ModelError):
    """A set of stages does not make a pipeline. ``kind`` is a stable name for the rule that is broken."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class JournalError(SwarmError):
    """The journal can't be written, or can't be read any more."""


class DeviceError(SwarmError):
    """A device computes something else than it should."""


class WireError(SwarmError):
    """A message can't be understood. The only exception that decoding raises, whatever the bytes are."""

    hint_status = 400


class ForeignMessage(WireError):
    """A message is whole but unknown to this build: its sender is of another one."""


class IllegalMove(SwarmError):
    """A core was driven against its rules. The text tells the story that led there."""


class ClientError(SwarmError):
    """The root of the errors that a caller of the client library can meet."""


class InvalidRequest(ClientError):
    """The request is wrong; nothing was started. ``code`` is a stable name for the reason."""

    hint_status = 400

    def __init__(self, text: str, code: str = "invalid") -> None:
        super().__init__(text)
        self.code = code


class Overloaded(ClientError):
    """The swarm refuses new work for now."""

    hint_status = 429

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Unavailable(ClientError):
    """No broker answers."""

    hint_status = 503


class RequestFailed(ClientError):
    """An accepted request ended without success; the text says why."""


class DeadlinePassed(RequestFailed):
    """The request's ``deadline_s`` passed, or could not be kept any more."""

    hint_status = 504


class RequestCancelled(ClientError):
    """The request was cancelled by somebody else than the caller."""

    hint_status = 499


class ReadElsewhere(ClientError):
    """Another client has attached to the request, and gets what comes of it from now on. It goes on."""

    hint_status = 409


class RequestTimeout(ClientError):
    """The caller's time limit passed; the request was cancelled."""

    hint_status = 504


@contextmanager
def whatever_ends_it(told: Callable[[BaseException], None]) -> Iterator[None]:
    """Tell a thread's owner what ended the thread: a bug, so whatever it is. No thread may die unnoticed, and nobody
    but its owner can say what becomes of the process."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 (it is told)
        told(error)
