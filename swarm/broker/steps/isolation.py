"""Isolation of suspects: each sequence of a step that raised is computed alone. Such steps alternate with steps of all
other sequences. The next failure then shows whether one of the sequences or the worker is to blame (``members.blame``).
"""

from __future__ import annotations

from typing import NamedTuple

from swarm.broker.state import Sequence, State


class EligibleSequences(NamedTuple):
    """Sequences that the next step may contain: decodes and prompts."""

    due: list[Sequence]
    prefilling: list[Sequence]


def choose_eligible(state: State) -> EligibleSequences:
    """Return one suspect, or all sequences that are not suspects, alternately."""
    evidence, everything = state.evidence, EligibleSequences(list(state.running.due.values()), state.running.prefilling)
    suspects = [s for s in (*everything.due, *everything.prefilling) if s.id in evidence.suspects]
    if not suspects:
        return everything
    has_others = len(everything.due) + len(everything.prefilling) > len(suspects)
    if has_others and not evidence.suspects_are_next:
        evidence.suspects_are_next = True
        return EligibleSequences(*([s for s in each if s not in suspects] for each in everything))
    evidence.suspects_are_next = False
    first = min(suspects, key=lambda s: evidence.last_failure_at(s.id))
    return EligibleSequences(*([s for s in each if s is first] for each in everything))
