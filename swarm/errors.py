"""All exceptions that Swarm raises.

    SwarmError
    ├── ConfigError            a setting is wrong: names the key, the value and the remedy
    ├── ModelError             a model can't be used: names the file or the part, and why
    │   ├── StageSetError      a set of layer ranges is not a pipeline (``kind`` names the broken rule)
    │   ├── OutOfMemory        this machine has too little memory now, whatever the model
    │   └── UnservedModel      it is complete, but of a kind or format that Swarm does not serve
    ├── JournalError           the journal can't be opened, read or written: names the file and the remedy
    ├── DeviceError            a device computes wrong results: names what differs
    ├── WireError              bytes from a peer can't be decoded: names the field
    │   └── ForeignMessage      they are complete, but this build does not support them: the peer is of another build
    ├── KvFull                 a stage's keys and values need more memory than the broker counts
    ├── IllegalMove            a core received something that its rules forbid: a bug, with its history
    └── ClientError            errors that a caller of the client library can get
        ├── InvalidRequest     the request is wrong; nothing was started
        │   └── PromptTooLong   the prompt certainly has more tokens than fit
        ├── Overloaded         the queue is full; ``retry_after_s``: when to try again
        │   └── JournalDown     the broker's journal can't be written or read now
        ├── Unavailable        no broker answers, or the connection was lost for good
        ├── RequestFailed      the swarm accepted the request and could not finish it
        │   └── DeadlinePassed  its ``deadline_s`` passed, or became impossible to meet
        ├── RequestCancelled   another client or an operator cancelled it
        ├── ReadElsewhere      another client reads the request now; it continues
        └── RequestTimeout     the caller's own timeout passed

``hint_status`` is the HTTP status for a gateway's response; it also shows whose fault it is: 4xx the caller's, 5xx
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SwarmError(Exception):
    """Base class of all errors. The text is one clear sentence, fit to be shown to a person."""

    hint_status = 500


class ConfigError(SwarmError):
    """A setting is wrong."""

    hint_status = 400


class ModelError(SwarmError):
    """A model, or a part of it, can't be used."""


class StageSetError(ModelError):
    """A set of stages is not a pipeline. ``kind`` is a stable name of the broken rule."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class OutOfMemory(ModelError):
    """A model can't be checked now because this machine has too little memory."""


class UnservedModel(ModelError):
    """A model of a kind or format that is not served, whatever its files."""


def shorten(error: BaseException) -> str:
    """Return the beginning of an error's text, in one line."""
    return " ".join(str(error).split())[:200]


@contextmanager
def refusing_model() -> Iterator[None]:
    """Raise ``UnservedModel`` for a ``ModelError`` that follows from the configuration alone."""
    try:
        yield
    except OutOfMemory:
        raise
    except ModelError as error:
        raise UnservedModel(str(error)) from None


class JournalError(SwarmError):
    """The journal can't be written or read."""


class DeviceError(SwarmError):
    """A device computes wrong results."""


class WireError(SwarmError):
    """A message can't be decoded. The only exception that decoding raises, for any input."""

    hint_status = 400


class ForeignMessage(WireError):
    """A message is complete but not supported by this build: its sender runs another build."""


class KvFull(SwarmError):
    """Keys and values need more memory than the broker counts. No request is to blame."""


class IllegalMove(SwarmError):
    """A core was used against its rules. The text contains the events that led there."""


class ClientError(SwarmError):
    """Base class of the errors that a caller of the client library can get."""


class InvalidRequest(ClientError):
    """The request is wrong; nothing was started. ``code`` is a stable name of the reason."""

    hint_status = 400

    def __init__(self, text: str, code: str = "invalid") -> None:
        super().__init__(text)
        self.code = code


class PromptTooLong(InvalidRequest):
    """The prompt certainly has more tokens than fit. ``least_tokens``: a proven lower bound of their number."""

    def __init__(self, text: str, least_tokens: int) -> None:
        super().__init__(text, code="context")
        self.least_tokens = least_tokens


class Overloaded(ClientError):
    """The swarm accepts no new work for now."""

    hint_status = 429

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class JournalDown(Overloaded):
    """The broker accepts and looks up no requests, because its journal can't be written or read now."""

    hint_status = 503


class Unavailable(ClientError):
    """No broker answers."""

    hint_status = 503


class RequestFailed(ClientError):
    """An accepted request ended without success; the text is the reason."""


class DeadlinePassed(RequestFailed):
    """The request's ``deadline_s`` passed, or became impossible to meet."""

    hint_status = 504


class RequestCancelled(ClientError):
    """The request was cancelled, but not by the caller."""

    hint_status = 499


class ReadElsewhere(ClientError):
    """Another client has attached to the request and gets its output from now on. The request continues."""

    hint_status = 409


class RequestTimeout(ClientError):
    """The caller's timeout passed; the request was cancelled."""

    hint_status = 504


@contextmanager
def report_thread_errors(on_error: Callable[[BaseException], None]) -> Iterator[None]:
    """Report any exception that ends a thread to the thread's owner, which decides about the process.

    Such an exception is a bug, and no thread may die unnoticed.
    """
    try:
        yield
    except BaseException as error:  # noqa: BLE001 (it is reported)
        on_error(error)
