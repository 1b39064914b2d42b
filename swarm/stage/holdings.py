"""What a stage holds of its sequences: their positions, their rooms in the executor, the log of what was sent.

The three change together, so they change here. What the executor has to do about it is appended to ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from swarm.stage.actions import (
    Action,
    ForkSequence,
    OpenSequence,
    ReleaseSequence,
    ShrinkSequence,
    TruncateSequence,
)
from swarm.stage.checkpoints import ActivationLog
from swarm.stage.positions import HeldTokens
from swarm.wire.messages import HeldSequence, LayerRange, Open, RangePosition, SequencePosition, Step


@dataclass(slots=True)
class Holdings:
    """See the module's text."""

    log: ActivationLog
    out: list[Action]
    sequences: dict[int, HeldTokens] = field(default_factory=dict)

    def inventory(self) -> tuple[HeldSequence, ...]:
        """What is held, for Activated. What was retired is not among it: only the broker that did it can make use of
        it, and a later one may think that it has not ended."""
        held = self.sequences.items()
        return tuple(HeldSequence(sequence, tuple(each.kv)) for sequence, each in held if not each.is_retired)

    def introduction(self) -> tuple[HeldSequence, ...]:
        """The same for Hello, with the digests by which a broker tells whether these are its sequences."""
        return tuple(
            msgspec.structs.replace(held, digests=self.sequences[held.sequence].digests()) for held in self.inventory()
        )

    def apply_header(self, step: Step, layers: LayerRange) -> str | None:
        """Retire, release, open, truncate, in this order; why it can't be done, if so."""
        for cut in step.retire:
            self._retire(cut)
        for sequence in step.release:
            self.release(sequence)
        for item in step.open:
            problem = self._open(item, layers)
            if problem is not None:
                return problem
        for cut in step.truncate:
            held = self.sequences.get(cut.sequence)
            if held is None:
                return f"sequence {cut.sequence} is to be cut, but it is not open here"
            self._truncate(cut.sequence, cut.position)
        return None

    def _open(self, item: Open, layers: LayerRange) -> str | None:
        held = self.sequences.get(item.sequence)
        if held is not None:  # told again in a new epoch: what it holds stays
            held.open = item
            held.history = list(item.tokens)
            return None
        position = item.shared if item.source is not None else 0
        if item.source is None:
            self.out.append(OpenSequence(item.sequence, item.limit))
        else:
            source = self.sequences.get(item.source)
            if source is None or (source.position() or 0) < position:
                return (
                    f"sequence {item.sequence} is to begin as {item.source}, which does not hold {position} positions"
                )
            self.out.append(ForkSequence(item.sequence, item.source, position, item.limit))
            self.log.fork(item.sequence, item.source, position)
        self.sequences[item.sequence] = HeldTokens(item, list(item.tokens), [RangePosition(layers, position)])
        return None

    def open_empty(self, item: Open, layers: LayerRange) -> None:
        """Room for a sequence that is going to be rebuilt."""
        self.out.append(OpenSequence(item.sequence, item.limit))
        self.sequences[item.sequence] = HeldTokens(item, list(item.tokens), [RangePosition(layers, 0)])

    def _retire(self, cut: SequencePosition) -> None:
        """It has ended, its beginning stays for others to copy."""
        if cut.sequence in self.sequences:
            self._truncate(cut.sequence, cut.position)
            self.sequences[cut.sequence].is_retired = True
            self.out.append(ShrinkSequence(cut.sequence, cut.position))

    def _truncate(self, sequence: int, position: int) -> None:
        held = self.sequences[sequence]
        held.truncate(position)
        del held.history[position:]
        self.log.truncate(sequence, position)
        self.out.append(TruncateSequence(sequence, position))

    def release(self, sequence: int) -> None:
        """Forget a sequence; an unknown one is no error."""
        if self.sequences.pop(sequence, None) is not None:
            self.out.append(ReleaseSequence(sequence))
        self.log.release(sequence)

    def keep_only(self, live: tuple[SequencePosition, ...], layers: LayerRange) -> None:
        """``layers`` are held from now on: cut the live sequences to what counts, let all others go. So
        do those that were retired, should a broker that doesn't know it count on them: they have no room to grow."""
        positions = {item.sequence: item.position for item in live}
        for sequence in [s for s, held in self.sequences.items() if s not in positions or held.is_retired]:
            self.release(sequence)
        for sequence, held in self.sequences.items():
            held.take_over(layers)
            self._truncate(sequence, positions[sequence])

    def clear(self) -> None:
        """Let all sequences go."""
        for sequence in list(self.sequences):
            self.release(sequence)
        self.log.clear()
