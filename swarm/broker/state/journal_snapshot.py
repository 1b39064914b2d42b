"""Contents of a journal: requests with their sequences, as they were when the last broker ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from swarm.wire.messages import AdapterEntry, FinishReason, Hop, Lineage, Manifest, Submit, TokenLogprob

# generations; two copies of one journal choose the same next generation with a probability of 1 in this number
_MAX_GENERATION_STEP = 1 << 20


@dataclass(slots=True)
class SequenceRecord:
    """One sequence as recorded in the journal."""

    id: int
    index: int
    tokens: list[int] = field(default_factory=list)  # generated tokens, complete from the first on
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    hops: list[tuple[Hop, ...]] = field(default_factory=list)
    reason: FinishReason | None = None  # None if it has not ended
    detail: str = ""
    num_cached: int = 0  # prompt tokens that came from the prefix cache
    vector: bytes = b""  # the answer of a request for a vector
    prompt_logprobs: bytes = b""  # all of them, or none yet


@dataclass(slots=True)
class RequestRecord:
    """One request as recorded in the journal."""

    submit: Submit
    tenant: str
    age_s: float  # seconds since it was accepted, by a monotonic clock, where that is available
    sequences: list[SequenceRecord]
    ended_age_s: float | None = None  # seconds since its last sequence ended; None if one has not

    @property
    def has_ended(self) -> bool:
        return all(sequence.reason is not None for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """State restored from a journal."""

    epoch: int = 0  # highest epoch that was announced
    workers: tuple[str, ...] = ()  # names of the workers of the last plan
    next_sequence: int = 1
    requests: tuple[RequestRecord, ...] = ()
    manifest: Manifest | None = None  # model of that plan
    adapters: tuple[AdapterEntry, ...] = ()  # loaded at run time
    dropped_adapters: tuple[str, ...] = ()  # keys of those that new requests can't have
    blames: tuple[tuple[int, int], ...] = ()  # (sequence, worker deaths at which it was in flight)
    notes: tuple[str, ...] = ()  # damage found in the journal, as text


def next_lineage(former: Lineage, random: Random) -> Lineage:
    """Return the lineage of the next broker process, or the first one of a new journal if there was none."""
    journal = former.journal or random.randbytes(8).hex()
    return Lineage(journal, former.generation + 1 + random.randrange(_MAX_GENERATION_STEP))
