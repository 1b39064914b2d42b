"""A step has come back: which positions count from now on, and who is drawn for again.

What a sequence was when the step was sent counts: one that has given its room back since (``stay``) begins anew, and
what comes of it now is of its former self.
"""

from __future__ import annotations

from swarm.broker.state import Flight, State
from swarm.broker.state.sequences import SequenceState
from swarm.wire.messages import SequencePosition


def acknowledge(state: State, reached: tuple[SequencePosition, ...], flight: Flight, *, keeps_kv: bool) -> None:
    """Every stage has done these rows: their keys and values are everywhere."""
    for sequence_id, position in ((k.sequence, k.position) for k in reached):
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.stay != flight.stays.get(sequence_id):
            continue  # it has given its room back since
        if sequence.state is SequenceState.RUNNING:
            sequence.acknowledge(position)
            state.prefix.acknowledge(sequence_id, sequence.tokens, sequence.kv)
            if not keeps_kv and sequence.kv == sequence.scheduled == sequence.sampled:
                sequence.drop_kv()
                state.running.refresh(sequence)


def put_off(state: State, late: tuple[int, ...], flight: Flight) -> None:
    """Have those drawn for again that the last stage could not draw for yet."""
    for sequence_id in late:
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.stay != flight.stays.get(sequence_id):
            continue  # it has given its room back since
        if sequence.state is SequenceState.RUNNING and sequence.kv == sequence.scheduled == sequence.sampled:
            sequence.draw_again()
            state.running.refresh(sequence)
            state.count("draws_put_off")
