"""The thread that receives copies of keys and values, on a listener of its own.

Copies must not delay steps, so they arrive on other connections and another thread decodes them and verifies their
checksums. The compute thread takes them, a few at a time, when it has nothing else to do. While ``MAX_PARTS`` or
``MAX_BYTES`` wait for it, this thread reads nothing more: then kernel buffers fill up, and the senders are blocked.

The listener accepts peers like the listener for steps does: at loopback by the token in its address, elsewhere by their
keys. What is no valid part of this model is counted, logged and dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from swarm.clock import Clock
from swarm.errors import ConfigError, WireError, report_thread_errors
from swarm.log import LogRateLimiter, get_logger
from swarm.stage.executor import KvData
from swarm.stage.shell.connections import StepListener
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import BLOCK, KvPart
from swarm.wire.transport.io_loop import WakeupFd
from swarm.wire.transport.keys import KeyPair

if TYPE_CHECKING:
    from swarm.config import Settings

MAX_PARTS: Final = 64  # parts that wait for the compute thread; senders send parts of many sequences together
MAX_BYTES: Final = 16 << 20  # of their keys and values, and one part more
MAX_FRAME_BYTES: Final = 128 << 20  # a block of all layers of a large model; usual parts are far smaller
_TICK_S: Final = 0.5  # longest wait; listeners check their deadlines at least this often

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReceivedPart:
    """A part that was decoded and verified. ``sender``: key with which the sender authenticated, if the listener checks
    keys."""

    part: KvPart
    data: KvData
    sender: str


class KvReceiver:
    """Owner of the listener for copies and of the thread that reads it.

    ``fits``: whether such data can be this model's. ``on_part`` is called by the thread when parts can be taken, and
    ``on_crash`` when a bug has ended it.
    """

    def __init__(
        self,
        listener: StepListener,
        clock: Clock,
        *,
        fits: Callable[[KvData], bool],
        on_part: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._listener = listener
        self._pull = listener.pull
        self._clock = clock
        self._fits, self._on_part, self._on_crash = fits, on_part, on_crash
        self._parts: deque[ReceivedPart] = deque()  # appended by this thread, taken by the compute thread
        self._num_taken_bytes = 0  # of the parts that were taken; ``num_bytes`` less these wait
        self._is_full = False  # this thread waits until a part is taken
        self._allowed: frozenset[str] | None = None  # keys to accept from now on; None: no change
        self._lock = threading.Lock()  # protects ``_allowed``
        self._wake = WakeupFd()
        self._stopping = False
        self._log_limiter = LogRateLimiter()
        self.num_parts = 0  # valid parts received
        self.num_bytes = 0  # of keys and values in them
        self.num_refused = 0  # messages that were no valid parts
        self._thread = threading.Thread(target=self._run, name="kv", daemon=True)

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    @property
    def num_peers_refused(self) -> int:
        """Connections that the listener refused."""
        return self._pull.num_refused

    @property
    def has_parts(self) -> bool:
        return bool(self._parts)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> bool:
        """End the thread, which closes the listener. Returns False if it is still busy after the grace time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(grace_s)
        return not self._thread.is_alive()

    def take(self) -> ReceivedPart | None:
        """Return the next part, or None. Called by the compute thread."""
        if not self._parts:
            return None
        part = self._parts.popleft()
        self._num_taken_bytes += part.data.numbers.nbytes
        if self._is_full:  # otherwise the thread would wake up for every part
            self._wake.set()
        return part

    def set_allowed(self, keys: frozenset[str]) -> None:
        """Accept only peers with these keys from now on. May be called from any thread."""
        with self._lock:
            self._allowed = keys
        self._wake.set()

    # --- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with report_thread_errors(self._report_crash):
                while not self._stopping:
                    self._run_once()
        finally:
            self._pull.close()

    def _report_crash(self, error: BaseException) -> None:
        log.exception("kv_receiver_died")
        self._on_crash(error)

    def _run_once(self) -> None:
        self._is_full = True  # before the look: what is taken later wakes this thread
        self._is_full = not self._has_room
        self._pull.wait(_TICK_S, wake=self._wake, incoming=not self._is_full)
        self._wake.clear()
        self._apply_allowed()
        num_parts = self.num_parts
        while self._has_room and not self._stopping and (frames := self._pull.receive()) is not None:
            self._receive(frames)
        if self.num_parts > num_parts:
            self._on_part()

    @property
    def _has_room(self) -> bool:
        return len(self._parts) < MAX_PARTS and self.num_bytes - self._num_taken_bytes < MAX_BYTES

    def _apply_allowed(self) -> None:
        with self._lock:
            keys, self._allowed = self._allowed, None
        if keys is not None:
            self._listener.set_allowed(keys, "")

    def _receive(self, frames: list[memoryview]) -> None:
        sender = self._pull.sender_key
        try:
            part, data = self._decode(frames)
        except WireError as error:
            self.num_refused += 1
            if (left_out := self._log_limiter.take(self._clock.now())) is not None:
                log.warning("kv_part_refused", sender=sender[:16], reason=str(error), left_out=left_out)
            return
        self.num_parts += 1
        self.num_bytes += data.numbers.nbytes
        self._parts.append(ReceivedPart(part, data, sender))

    def _decode(self, frames: list[memoryview]) -> tuple[KvPart, KvData]:
        """Decode a message. Raises WireError, also for data without a checksum or of another model."""
        part, payload = DATA.decode(frames)
        if not isinstance(part, KvPart) or payload is None:
            raise WireError(f"a {type(part).__name__} arrived, which is no part of keys and values")
        if not part.tensor.checksum:
            raise WireError("kv_part.tensor.checksum: it is missing")
        start = part.block * BLOCK
        # as bytes of the frame, which nothing else uses, so that the compute thread need not copy them
        stored = tensors.view(part.tensor, payload)
        numbers = np.frombuffer(payload, stored.dtype) if not payload.readonly else stored.reshape(-1)
        data = KvData(part.layers, start, start + len(part.tokens), part.tensor.dtype, numbers)
        if not self._fits(data):
            raise WireError(
                f"kv_part.tensor: {numbers.nbytes} bytes of {data.dtype} are no keys and values of {len(part.tokens)} "
                f"positions in {part.layers.label} of this model"
            )
        return part, data


def open_kv_listener(settings: Settings, pair: KeyPair) -> StepListener | None:
    """Return a listener for copies; None if there is no port left for it, which costs only the copies."""
    try:
        return StepListener.open(settings, pair, MAX_FRAME_BYTES)
    except ConfigError as error:
        log.warning("no_kv_listener", reason=str(error), note="this worker takes no copies of keys and values")
        return None
