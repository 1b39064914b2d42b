"""Recheck: computing another worker's results again, so that the broker can compare them.

The worker whose log holds the inputs of some layers (``Recheck``) sends them as a step with a *route*: workers that
have these layers loaded, each with its part of them, which compute one after the other. A recheck never touches stored
sequences: it has keys and values of its own, is not part of an epoch's order, and is not logged. The last worker
reports the digest of its output or, after the model's last layer, the tokens that it draws.

A recheck runs in idle time, in chunks: one chunk whenever no step has arrived, so a step waits for at most one chunk.
One route at a time; a further request beyond the queue's bound is answered with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from swarm.stage.actions import Action, ComputeRecheck, SendRecheck, SendToBroker
from swarm.stage.events import Idle, RecheckComputed, RecheckFailed
from swarm.stage.executor import Batch, SampleJob
from swarm.stage.log import ActivationLog
from swarm.wire.messages import GetDigest, LayerRange, LogDigest, Recheck, Rechecked, RecheckRoute, Row, Step
from swarm.wire.tensors import find_not_finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.stage.executor import ForwardResult

CHUNK = 32  # positions: one cell of the arena, and the longest that a step waits for a recheck
MAX_WAITING = 2


def compute_digest(hidden: NDArray[np.float32]) -> str:
    """Return a digest of all bits of hidden states."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(hidden).data)


@dataclass(slots=True)
class _Job:
    """A recheck in this worker's queue."""

    step: Step
    trial: RecheckRoute
    hidden: NDArray[np.float32] | None
    num_done: int = 0  # positions computed so far
    is_running: bool = False  # a chunk is on the device
    outputs: list[NDArray[np.float32]] = field(default_factory=list)  # hidden states of the chunks computed so far
    tokens: list[int] = field(default_factory=list)  # tokens drawn so far, after the last layer

    @property
    def stop(self) -> int:
        return len(self.step.tokens)

    @property
    def layers(self) -> LayerRange:
        return self.trial.legs[0].layers


@dataclass(slots=True)
class RecheckQueue:
    """Queue of rechecks. The first one is being computed."""

    incarnation: str
    num_layers: int
    log: ActivationLog
    count: Callable[[str, float], None]
    waiting: deque[_Job] = field(default_factory=deque)

    @property
    def has_work(self) -> bool:
        """Whether a chunk is waiting and none is on the device."""
        return bool(self.waiting) and not self.waiting[0].is_running

    def clear(self) -> None:
        """Drop all rechecks: the epoch has ended and the broker does not wait for them. A chunk on the device still
        finishes."""
        self.waiting.clear()

    # --- orders ------------------------------------------------------------------------------------------------------

    def report_digest(self, order: GetDigest) -> SendToBroker:
        hidden = self.log.read(order.sequence, order.boundary, 0, order.stop)
        digest = "" if hidden is None else compute_digest(hidden)
        return SendToBroker(
            LogDigest(epoch=order.epoch, incarnation=self.incarnation, ticket=order.ticket, digest=digest)
        )

    def handle_order(self, order: Recheck | GetDigest) -> list[Action]:
        """Handle an order whose epoch is not below the fence."""
        return [self.report_digest(order)] if isinstance(order, GetDigest) else self.send_logged(order)

    def handle_event(self, event: Idle | RecheckComputed | RecheckFailed, *, is_idle: bool) -> list[Action]:
        """Handle an event of a recheck. ``is_idle``: nothing else waits to be computed."""
        match event:
            case Idle():
                return self.start() if is_idle else []
            case RecheckComputed(ticket, forwarded):
                return self.on_computed(ticket, forwarded)
            case RecheckFailed(ticket, reason):
                return self.on_failed(ticket, reason)

    def send_logged(self, order: Recheck) -> list[Action]:
        """Send the logged inputs to the first worker of the route. At boundary 0, that is this worker itself."""
        step = Step(
            epoch=order.epoch,
            step=0,
            rows=(Row(order.open.sequence, 0, order.stop, False),),
            tokens=order.open.tokens[: order.stop],
            open=(order.open,),
            trial=order.trial,
            cause=order.cause,
            lineage=order.lineage,
        )
        if not order.trial.legs or not 0 < order.stop <= len(order.open.tokens):
            return [self._report(step, order.trial, problem="the order lacks workers or tokens")]
        if order.boundary == 0:
            return self.add(step, None)
        hidden = self.log.read(order.open.sequence, order.boundary, 0, order.stop)
        if hidden is None:
            return [self._report(step, order.trial, problem="the log of what goes into these layers has gone")]
        self.count("rechecks_sent", 1)
        return [SendRecheck(order.trial.legs[0].to, step, hidden)]

    def add(self, step: Step, hidden: NDArray[np.float32] | None) -> list[Action]:
        trial = step.trial
        assert trial is not None
        problem = None
        if len(self.waiting) >= MAX_WAITING:
            problem = "there is no time"
        elif not trial.legs or len(step.rows) != 1 or len(step.open) != 1 or not step.tokens:
            problem = "it is not one row of one sequence"
        elif (hidden is None) != (trial.legs[0].layers.first == 0):
            problem = f"layers {trial.legs[0].layers} can't begin with that"
        elif find_not_finite(step, hidden):
            problem = "what goes into these layers is not finite"
        if problem is not None:
            return [self._report(step, trial, problem=problem)]
        self.waiting.append(_Job(step, trial, hidden))
        return []

    # --- computing ---------------------------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """Start the next chunk, if one is waiting."""
        if not self.has_work:
            return []
        job = self.waiting[0]
        job.is_running = True
        first, stop = job.num_done, self._chunk_end(job)
        is_drawn = stop - first == 1 and stop > self._first_drawn(job)
        row = Row(job.step.rows[0].sequence, first, stop - first, is_drawn)
        hidden = None if job.hidden is None else job.hidden[first:stop]
        samples: tuple[SampleJob, ...] = ()
        opened = job.step.open[0]
        if is_drawn:
            samples = (SampleJob(0, opened.params, opened.seed, list(job.step.tokens[:stop]), opened.num_prompt),)
        tokens = np.asarray(job.step.tokens[first:stop], dtype=np.int64)
        adapters = (opened.params.adapter,) if opened.params.adapter else ()
        batch = Batch((row,), tokens, hidden, samples, alone=False, through=job.layers, adapters=adapters)
        return [ComputeRecheck(job.step.epoch, job.trial.ticket, batch, job.stop)]

    def _first_drawn(self, job: _Job) -> int:
        """Return the position from which on each position draws a token (only after the last layer)."""
        return job.stop - job.trial.drawn if job.layers.stop == self.num_layers else job.stop

    def _chunk_end(self, job: _Job) -> int:
        """Return the end of the next chunk. Positions that draw go one by one, as in the original computation."""
        drawn_from = self._first_drawn(job)
        return job.num_done + 1 if job.num_done >= drawn_from else min(job.num_done + CHUNK, drawn_from)

    def on_computed(self, ticket: int, forwarded: ForwardResult) -> list[Action]:
        """Record a finished chunk. After the last one, send the output to the next worker of the route, or report the
        result."""
        job = self._running_job(ticket)
        if job is None:
            return []
        job.num_done, job.is_running = self._chunk_end(job), False
        if forwarded.hidden is not None:
            job.outputs.append(forwarded.hidden)
        job.tokens.extend(sampled.token for sampled in forwarded.sampled)
        if job.num_done < job.stop:
            return []
        self.waiting.popleft()
        self.count("rechecked_positions", job.stop)
        if not job.outputs:
            return [self._report(job.step, job.trial, tokens=tuple(job.tokens))]
        hidden = np.concatenate(job.outputs)
        remaining = job.trial.legs[1:]
        if not remaining:
            return [self._report(job.step, job.trial, digest=compute_digest(hidden))]
        trial = RecheckRoute(job.trial.ticket, remaining, job.trial.drawn)
        return [SendRecheck(remaining[0].to, msgspec.structs.replace(job.step, trial=trial, tensor=None), hidden)]

    def on_failed(self, ticket: int, reason: str) -> list[Action]:
        job = self._running_job(ticket)
        if job is None:
            return []
        self.waiting.popleft()
        return [self._report(job.step, job.trial, problem=reason[:4000])]

    def _running_job(self, ticket: int) -> _Job | None:
        job = self.waiting[0] if self.waiting else None
        return job if job is not None and job.is_running and job.trial.ticket == ticket else None

    def _report(
        self, step: Step, trial: RecheckRoute, *, digest: str = "", tokens: tuple[int, ...] = (), problem: str = ""
    ) -> SendToBroker:
        rechecked = Rechecked(
            epoch=step.epoch,
            incarnation=self.incarnation,
            ticket=trial.ticket,
            digest=digest,
            tokens=tokens,
            problem=problem,
        )
        return SendToBroker(rechecked)
