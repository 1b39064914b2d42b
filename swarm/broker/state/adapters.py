"""Adapters that are loaded at run time: the set that every member has, and its changes.

A request names an adapter. Once it is accepted, it has the adapter's key instead, so that prefixes, copies and what
is on disk never mix two contents that had one name after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from swarm.wire.messages import AdapterEntry, AdaptersSet, Asset, Hello, Json, Manifest, Submit, add_layer_bytes

RETRY_S, MAX_RETRY_S = 4.0, 60.0  # from a worker's problem until it is ordered to load again; doubled each time


@dataclass(slots=True)
class AdapterLoad:
    """A load in progress."""

    entry: AdapterEntry  # without a digest
    client: bytes  # that waits for the result
    deadline: float


@dataclass(slots=True)
class Candidate:
    """A worker that loads adapters before it is admitted."""

    hello: Hello
    adapters: tuple[AdapterEntry, ...]  # that it was ordered to have
    problem: str = ""  # why it can't load them
    failed_at: float = 0.0  # time at which it first reported this problem
    retry_s: float = 0.0  # from the latest report of it until it is ordered again
    retry_at: float = 0.0

    def repeat(self, hello: Hello) -> None:
        """Take its latest Hello, which may come over another connection."""
        self.hello = hello

    def fail(self, problem: str, now: float) -> bool:
        """Record why it can't load them, and when to order it again. Return whether the problem is a new one."""
        is_new = problem != self.problem
        if is_new:
            self.problem, self.failed_at = problem, now
        self.retry_s = RETRY_S if is_new else min(2 * self.retry_s, MAX_RETRY_S)
        self.retry_at = now + self.retry_s
        return is_new


@dataclass(slots=True)
class AdapterState:
    """The adapters (see the module). A worker that lacks one of ``needed`` is not admitted."""

    entries: tuple[AdapterEntry, ...] = ()
    # keys that new requests can't have -> the first step after those that may have rows with it; None while requests
    # that have not ended have it
    dropped: dict[str, int | None] = field(default_factory=dict)
    load: AdapterLoad | None = None
    number: int = 0  # of the latest order; 0: nothing was loaded yet
    ordered: dict[str, tuple[int, float]] = field(default_factory=dict)  # incarnation -> order sent last, and when
    answers: dict[str, AdaptersSet] = field(default_factory=dict)  # to the latest order, by incarnation
    candidates: dict[str, Candidate] = field(default_factory=dict)  # by incarnation
    ticket: int = 0  # of the latest write to the journal
    unwritten: dict[int, tuple[bytes, Json]] = field(default_factory=dict)  # ticket -> client, and what it gets

    @property
    def wanted(self) -> tuple[AdapterEntry, ...]:
        """What members are ordered to have."""
        return self.entries if self.load is None else (*self.entries, self.load.entry)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.entries)

    @property
    def needed(self) -> tuple[AdapterEntry, ...]:
        """What a worker must have to join: also what was dropped, while requests have it."""
        return tuple(entry for entry in self.entries if self.dropped.get(entry.key) is None)

    def fit(self, manifest: Manifest) -> bool:
        """Whether the set may be this model's, as far as sizes tell."""
        return all(len(entry.layer_bytes) == manifest.num_layers for entry in self.entries)

    def order_for(self, hello: Hello) -> tuple[AdapterEntry, ...] | None:
        """Return what a worker loads before it joins; None if it lacks nothing. One that was dropped is loaded after
        the others and by itself, so that a problem of the load is known to be one of this adapter."""
        held = {entry.key for entry in hello.adapters}
        lacking = [entry for entry in self.needed if entry.key not in held]
        if not lacking:
            return None
        later = [entry.key for entry in lacking if entry.key in self.dropped]
        if len(later) == len(lacking):
            del later[0]
        return tuple(
            entry for entry in self.entries if entry.key in held or (entry in lacking and entry.key not in later)
        )

    def apply(self, manifest: Manifest) -> Manifest:
        """Return the manifest with these adapters."""
        if not self.entries:
            return manifest
        named = (entry for entry in self.entries if entry.key not in self.dropped)
        return msgspec.structs.replace(
            manifest,
            layer_bytes=add_layer_bytes(manifest.layer_bytes, (entry.layer_bytes for entry in self.entries)),
            adapters=(*manifest.adapters, *(Asset(entry.name, entry.num_bytes, entry.digest) for entry in named)),
        )

    def resolve(self, submit: Submit) -> Submit:
        """Return a submission with the key of the adapter that it names, if that was loaded at run time."""
        key = next((entry.key for entry in self.entries if entry.name == submit.params.adapter), "")
        return with_adapter(submit, key) if key else submit

    def shift_deadlines(self, pause_s: float) -> None:
        if self.load is not None:
            self.load.deadline += pause_s
        for candidate in self.candidates.values():
            candidate.failed_at += pause_s


def with_adapter(submit: Submit, adapter: str) -> Submit:
    return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, adapter=adapter))


def with_plain_name(submit: Submit) -> Submit:
    """Return a submission as its client made it, with the adapter's name instead of its key."""
    return with_adapter(submit, submit.params.adapter.partition("@")[0])
