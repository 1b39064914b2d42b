"""The content of a journal's file, as values in memory: a model of ``broker.journal.store``.

A test gives the same writes to both and compares what they return; so the simulated broker restarts from what the real
one would read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from swarm.broker.actions import (
    FinishJournalRewrite,
    NewTokens,
    WriteAcceptance,
    WriteAdapters,
    WriteEnd,
    WriteEpoch,
    WriteTokens,
)
from swarm.broker.journal import JournalWrite
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.wire.messages import AdapterEntry, Manifest, Submit


class LedgerRefusal(AssertionError):
    """The file would reject such a write: its sequences belong to another request."""


@dataclass(slots=True)
class LedgerSequence:
    """One sequence of a request."""

    id: int
    index: int
    parts: dict[int, NewTokens] = field(default_factory=dict)  # by the index of their first token
    whole: SequenceRecord | None = None  # all of it, once it has ended
    length: int = 0  # tokens without a gap

    def add(self, new: NewTokens) -> None:
        if self.whole is not None:
            return
        existing = self.parts.get(new.first)
        if existing is None or len(existing.ids) <= len(new.ids):
            self.parts[new.first] = new
        if new.first == self.length:
            self.length += len(new.ids)

    def end(self, write: WriteEnd) -> bool:
        """Record the end and return True; return False if tokens are missing, so that the end can't be recorded."""
        joined = self._join_parts()
        if len(joined.tokens) < write.num_tokens:
            return False
        for values in (joined.tokens, joined.logprobs, joined.hops):
            del values[write.num_tokens :]
        joined.reason, joined.detail, joined.vector = write.reason, write.detail, write.vector
        joined.num_cached = joined.num_cached or write.num_cached
        joined.prompt_logprobs = joined.prompt_logprobs or write.prompt_logprobs
        self.whole = joined
        self.parts.clear()
        return True

    def record(self) -> SequenceRecord:
        """Return a copy, which the caller may change."""
        if self.whole is None:
            return self._join_parts()
        whole = self.whole
        return replace(whole, tokens=whole.tokens[:], logprobs=whole.logprobs[:], hops=whole.hops[:])

    def _join_parts(self) -> SequenceRecord:
        record = SequenceRecord(self.id, self.index)
        for first in sorted(self.parts):
            part = self.parts[first]
            overlap = len(record.tokens) - first
            if overlap < 0:
                break
            record.tokens += part.ids[overlap:]
            record.logprobs += part.logprobs[overlap:]
            record.hops += part.hops[overlap:]
            record.num_cached = max(record.num_cached, part.num_cached)
            record.prompt_logprobs = record.prompt_logprobs or part.prompt_logprobs
        return record


@dataclass(slots=True)
class LedgerRequest:
    """One request."""

    submit: Submit
    tenant: str
    accepted_at: float
    continuations: list[LedgerSequence]
    ended_at: float | None = None  # None: one of its continuations has not ended

    def record(self, now: float) -> RequestRecord:
        return RequestRecord(
            self.submit,
            self.tenant,
            max(0.0, now - self.accepted_at),
            [continuation.record() for continuation in self.continuations],
            None if self.ended_at is None else max(0.0, now - self.ended_at),
        )


@dataclass(slots=True)
class Ledger:
    """Content of the file, requests in the order of acceptance."""

    epoch: int = 0
    workers: tuple[str, ...] = ()
    manifest: Manifest | None = None
    adapters: tuple[AdapterEntry, ...] = ()
    dropped_adapters: tuple[str, ...] = ()
    blames: tuple[tuple[int, int], ...] = ()
    next_sequence: int = 1
    requests: dict[str, LedgerRequest] = field(default_factory=dict)
    _continuations: dict[int, tuple[LedgerSequence, LedgerRequest]] = field(default_factory=dict)

    def write(self, writes: Iterable[JournalWrite], now: float) -> set[int]:
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
                    self._write_epoch(write)
                case WriteAdapters(_, adapters, dropped):
                    self.adapters, self.dropped_adapters = adapters, dropped
                case FinishJournalRewrite(epoch, next_sequence):
                    self._write_epoch(epoch)
                    self.next_sequence = max(self.next_sequence, next_sequence)
        return open_still

    def lose_pages(self, is_lost: Callable[[], bool]) -> None:
        """Damage pages: whole requests are lost, or the tokens of some sequences."""
        for request_id, request in list(self.requests.items()):
            if is_lost():
                del self.requests[request_id]
                for continuation in request.continuations:
                    del self._continuations[continuation.id]
                continue
            for continuation in request.continuations:
                if continuation.whole is None and is_lost():
                    continuation.parts.clear()
                    continuation.length = 0

    def _write_epoch(self, write: WriteEpoch) -> None:
        self.epoch, self.workers, self.blames = write.epoch, write.workers, write.blames
        self.manifest = write.manifest or self.manifest

    def snapshot(self, now: float, retained_s: float) -> JournalSnapshot:
        requests = [r for r in self.requests.values() if r.ended_at is None or r.ended_at > now - retained_s]
        return JournalSnapshot(
            epoch=self.epoch,
            workers=self.workers,
            next_sequence=self.next_sequence,
            requests=tuple(request.record(now) for request in requests),
            manifest=self.manifest,
            adapters=self.adapters,
            dropped_adapters=self.dropped_adapters,
            blames=self.blames,
        )

    def request(self, request_id: str, now: float) -> RequestRecord | None:
        request = self.requests.get(request_id)
        return None if request is None else request.record(now)

    def ended_requests(self, now: float, limit: int) -> Iterator[RequestRecord]:
        """Return the requests that have ended, the latest first."""
        ended = [request for request in self.requests.values() if request.ended_at is not None]
        ended.sort(key=lambda kept: kept.ended_at or 0.0, reverse=True)
        return (request.record(now) for request in islice(ended, limit))

    def has_ended(self, sequence: int) -> bool:
        entry = self._continuations.get(sequence)
        return entry is not None and entry[0].whole is not None

    def _accept(self, write: WriteAcceptance, now: float) -> None:
        request_id = write.submit.request_id
        former = self.requests.pop(request_id, None)
        for continuation in former.continuations if former is not None else ():
            del self._continuations[continuation.id]
        taken = [sequence for sequence in write.sequences if sequence in self._continuations]
        if taken:
            raise LedgerRefusal(f"sequences {taken} of {request_id} are another request's already")
        continuations = [LedgerSequence(sequence, place) for place, sequence in enumerate(write.sequences)]
        request = self.requests[request_id] = LedgerRequest(
            write.submit, write.tenant, now - write.age_s, continuations
        )
        self._continuations |= {continuation.id: (continuation, request) for continuation in continuations}
        self.next_sequence = max(self.next_sequence, max(write.sequences) + 1)

    def _end(self, write: WriteEnd, now: float) -> bool:
        entry = self._continuations.get(write.sequence)
        if entry is None or entry[0].whole is not None:
            return True
        continuation, request = entry
        is_taken = continuation.end(write)
        if is_taken and all(other.whole is not None for other in request.continuations):
            request.ended_at = now
            if write.has_pixels:
                request.submit = msgspec.structs.replace(request.submit, pixels=())
        return is_taken
