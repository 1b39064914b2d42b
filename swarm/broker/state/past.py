"""What a journal tells of the past: requests with their sequences, as they were when the last broker ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from swarm.wire.messages import FinishReason, Hop, Lineage, Manifest, Submit, TokenLogprob

_MOST_AT_ONCE = 1 << 20  # generations: two copies of a journal come to the same once in so many times


@dataclass(slots=True)
class SequenceRecord:
    """One continuation. ``tokens``: the generated ones, without a gap from the first on. ``reason`` None: not ended.
    ``num_cached``: tokens of the prompt that came from the prefix cache."""

    id: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    hops: list[tuple[Hop, ...]] = field(default_factory=list)
    reason: FinishReason | None = None
    detail: str = ""
    num_cached: int = 0


@dataclass(slots=True)
class RequestRecord:
    """``age_s``: how long ago it was accepted, by a clock that nobody sets, where that is known. ``ended_age_s``: how
    long ago its last sequence ended; None while one has not."""

    submit: Submit
    tenant: str
    age_s: float
    sequences: list[SequenceRecord]
    ended_age_s: float | None = None

    @property
    def ended(self) -> bool:
        return all(sequence.reason is not None for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Past:
    """Keeps all that counts of the past. ``epoch``: the highest that was announced. ``workers``: the names of the last
    plan's. ``manifest``: of the model that it was for. ``blames``: (sequence, deaths at which it was in flight).
    ``notes``: what was wrong with the journal, in words."""

    epoch: int = 0
    workers: tuple[str, ...] = ()
    next_sequence: int = 1
    requests: tuple[RequestRecord, ...] = ()
    manifest: Manifest | None = None
    blames: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


def following(former: Lineage, chance: Random) -> Lineage:
    """Name the next life: of this journal, or the first one of a new journal, if there was none."""
    journal = former.journal or chance.randbytes(8).hex()
    return Lineage(journal, former.generation + 1 + chance.randrange(_MOST_AT_ONCE))
