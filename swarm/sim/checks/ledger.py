"""The content of a journal's file, as values in memory: a model of ``broker.journal.store``.

A test gives the same writes to both and compares what they return; so the simulated broker restarts from what the real
one would read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from swarm.broker.actions import NewTokens, WriteAcceptance, WriteAnew, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.journal import Write
from swarm.broker.state.past import Past, RequestRecord, SequenceRecord
from swarm.wire.messages import Manifest, Submit


class Refused(AssertionError):
    """The file would reject such a write: its sequences belong to another request."""


@dataclass(slots=True)
class Continuation:
    """One sequence of a request."""

    id: int
    index: int
    parts: dict[int, NewTokens] = field(default_factory=dict)  # by the index of their first token
    whole: SequenceRecord | None = None  # all of it, once it has ended
    length: int = 0  # tokens without a gap

    def add(self, new: NewTokens) -> None:
        if self.whole is not None:
            return
        known = self.parts.get(new.first)
        if known is None or len(known.ids) <= len(new.ids):
            self.parts[new.first] = new
        if new.first == self.length:
            self.length += len(new.ids)

    def end(self, write: WriteEnd) -> bool:
        """Record the end; return False if tokens are missing, so that it has not ended here."""
        joined = self._joined()
        if len(joined.tokens) < write.num_tokens:
            return False
        for values in (joined.tokens, joined.logprobs, joined.hops):
            del values[write.num_tokens :]
        joined.reason, joined.detail = write.reason, write.detail
        self.whole = joined
        self.parts.clear()
        return True

    def record(self) -> SequenceRecord:
        """Return a copy, which the caller may change."""
        if self.whole is None:
            return self._joined()
        whole = self.whole
        return replace(whole, tokens=whole.tokens[:], logprobs=whole.logprobs[:], hops=whole.hops[:])

    def _joined(self) -> SequenceRecord:
        found = SequenceRecord(self.id, self.index)
        for first in sorted(self.parts):
            part = self.parts[first]
            known = len(found.tokens) - first
            if known < 0:
                break
            found.tokens += part.ids[known:]
            found.logprobs += part.logprobs[known:]
            found.hops += part.hops[known:]
            found.num_cached = max(found.num_cached, part.num_cached)
        return found


@dataclass(slots=True)
class Kept:
    """One request."""

    submit: Submit
    tenant: str
    accepted_at: float
    continuations: list[Continuation]
    ended_at: float | None = None  # None: one of its continuations has not ended

    def record(self, now: float) -> RequestRecord:
        return RequestRecord(
            self.submit,
            self.tenant,
            max(0.0, now - self.accepted_at),
            [each.record() for each in self.continuations],
            None if self.ended_at is None else max(0.0, now - self.ended_at),
        )


@dataclass(slots=True)
class Ledger:
    """Content of the file, requests in the order of acceptance."""

    epoch: int = 0
    workers: tuple[str, ...] = ()
    manifest: Manifest | None = None
    blames: tuple[tuple[int, int], ...] = ()
    next_sequence: int = 1
    requests: dict[str, Kept] = field(default_factory=dict)
    _continuations: dict[int, tuple[Continuation, Kept]] = field(default_factory=dict)

    def write(self, writes: Iterable[Write], now: float) -> set[int]:
        """Apply writes; return the sequences whose ends were not accepted because tokens are missing."""
        open_still: set[int] = set()
        for write in writes:
            match write:
                case WriteTokens(tokens):
                    for new in tokens:
                        if new.sequence in self._continuations:
                            self._continuations[new.sequence][0].add(new)
                case WriteEnd():
                    if not self._end(write, now):
                        open_still.add(write.sequence)
                case WriteAcceptance():
                    self._accept(write, now)
                case WriteEpoch():
                    self._hear(write)
                case WriteAnew(epoch, next_sequence):
                    self._hear(epoch)
                    self.next_sequence = max(self.next_sequence, next_sequence)
        return open_still

    def lose(self, is_lost: Callable[[], bool]) -> None:
        """Damage pages: whole requests are lost, or the tokens of some sequences."""
        for request_id, kept in list(self.requests.items()):
            if is_lost():
                del self.requests[request_id]
                for each in kept.continuations:
                    del self._continuations[each.id]
                continue
            for each in kept.continuations:
                if each.whole is None and is_lost():
                    each.parts.clear()
                    each.length = 0

    def _hear(self, write: WriteEpoch) -> None:
        self.epoch, self.workers, self.blames = write.epoch, write.workers, write.blames
        self.manifest = write.manifest or self.manifest

    def past(self, now: float, retained_s: float) -> Past:
        kept = [r for r in self.requests.values() if r.ended_at is None or r.ended_at > now - retained_s]
        return Past(
            epoch=self.epoch,
            workers=self.workers,
            next_sequence=self.next_sequence,
            requests=tuple(request.record(now) for request in kept),
            manifest=self.manifest,
            blames=self.blames,
        )

    def request(self, request_id: str, now: float) -> RequestRecord | None:
        kept = self.requests.get(request_id)
        return None if kept is None else kept.record(now)

    def ended(self, now: float, limit: int) -> Iterator[RequestRecord]:
        """Return the requests that have ended, the latest first."""
        ended = [kept for kept in self.requests.values() if kept.ended_at is not None]
        ended.sort(key=lambda kept: kept.ended_at or 0.0, reverse=True)
        return (kept.record(now) for kept in islice(ended, limit))

    def has_ended(self, sequence: int) -> bool:
        found = self._continuations.get(sequence)
        return found is not None and found[0].whole is not None

    def _accept(self, write: WriteAcceptance, now: float) -> None:
        request_id = write.submit.request_id
        former = self.requests.pop(request_id, None)
        for each in former.continuations if former is not None else ():
            del self._continuations[each.id]
        taken = [sequence for sequence in write.sequences if sequence in self._continuations]
        if taken:
            raise Refused(f"sequences {taken} of {request_id} are another request's already")
        continuations = [Continuation(sequence, place) for place, sequence in enumerate(write.sequences)]
        kept = self.requests[request_id] = Kept(write.submit, write.tenant, now - write.age_s, continuations)
        self._continuations |= {each.id: (each, kept) for each in continuations}
        self.next_sequence = max(self.next_sequence, max(write.sequences) + 1)

    def _end(self, write: WriteEnd, now: float) -> bool:
        found = self._continuations.get(write.sequence)
        if found is None or found[0].whole is not None:
            return True
        continuation, kept = found
        is_taken = continuation.end(write)
        if is_taken and all(each.whole is not None for each in kept.continuations):
            kept.ended_at = now
        return is_taken
