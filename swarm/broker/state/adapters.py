"""Adapters that are loaded at run time: the set that every member has, and its changes.

A request names an adapter. Once it is accepted, it has the adapter's key instead, so that prefixes, copies and what
is on disk never mix two contents that had one name after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from swarm.wire.messages import AdapterEntry, AdaptersSet, Asset, Hello, Json, Manifest, Submit, add_layer_bytes


@dataclass(slots=True)
class AdapterLoad:
    """A load in progress."""

    entry: AdapterEntry  # without a digest
    client: bytes  # that waits for the result
    deadline: float


@dataclass(slots=True)
class AdapterState:
    """The adapters (see the module). A member that lacks one of ``entries`` is not admitted."""

    entries: tuple[AdapterEntry, ...] = ()
    # keys that new requests can't have -> the first step after those that may have rows with it; None while requests
    # that have not ended have it
    dropped: dict[str, int | None] = field(default_factory=dict)
    load: AdapterLoad | None = None
    number: int = 0  # of the latest order; 0: nothing was loaded yet
    ordered: dict[str, tuple[int, float]] = field(default_factory=dict)  # incarnation -> order sent last, and when
    answers: dict[str, AdaptersSet] = field(default_factory=dict)  # to the latest order, by incarnation
    candidates: dict[str, Hello] = field(default_factory=dict)  # workers that load before they are admitted
    ticket: int = 0  # of the latest write to the journal
    unwritten: dict[int, tuple[bytes, Json]] = field(default_factory=dict)  # ticket -> client, and what it gets

    @property
    def wanted(self) -> tuple[AdapterEntry, ...]:
        """What members are ordered to have."""
        return self.entries if self.load is None else (*self.entries, self.load.entry)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.entries)

    def lacks(self, hello: Hello) -> bool:
        """Whether a worker lacks one of the adapters."""
        return not self.keys <= {entry.key for entry in hello.adapters}

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


def with_adapter(submit: Submit, adapter: str) -> Submit:
    return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, adapter=adapter))


def with_plain_name(submit: Submit) -> Submit:
    """Return a submission as its client made it, with the adapter's name instead of its key."""
    return with_adapter(submit, submit.params.adapter.partition("@")[0])
