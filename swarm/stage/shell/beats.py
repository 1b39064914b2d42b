"""The beat thread: says that the worker's process lives and how far it is, over a socket of its own."""

from __future__ import annotations

import threading

import zmq

from swarm import failpoints
from swarm.stage.shell.vitals import Vitals
from swarm.wire.channel import PushChannel
from swarm.wire.codec import BEAT
from swarm.wire.messages import Beat


class BeatThread:
    """Says that the process lives, whatever its other threads do."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        interval_s: float,
        incarnation: str,
        vitals: Vitals,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._incarnation = incarnation
        self._vitals = vitals
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        push = PushChannel(self._context, self._endpoint)
        try:
            while not self._stopped.wait(self._interval_s):
                if failpoints.armed:
                    failpoints.reached("beat.due")
                push.send(BEAT.encode(self._beat()))
        finally:
            push.close()

    def _beat(self) -> Beat:
        vitals = self._vitals
        return Beat(
            epoch=vitals.epoch,
            incarnation=self._incarnation,
            progress=vitals.progress,
            state=vitals.shown,
            blocked_on=vitals.blocked_on,
            since_s=max(0.0, vitals.clock.now() - vitals.shown_since),
            loop_lag_s=vitals.loop_lag_s,
            memory_bytes=vitals.memory_bytes,
            kv_used=vitals.kv_used,
            kv_capacity=vitals.kv_capacity,
        )
