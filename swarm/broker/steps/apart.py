"""Isolation of suspects: each sequence of a step that raised is computed alone, alternating with steps of all others.

The next failure then shows whether one of the sequences or the worker is to blame (``members.blame``).
"""

from __future__ import annotations

from typing import NamedTuple

from swarm.broker.state import Sequence, State


class Apart(NamedTuple):
    """Sequences that the next step may contain: decodes and prompts."""

    due: list[Sequence]
    prefilling: list[Sequence]


def who_may_go(state: State) -> Apart:
    """Return one suspect, or all sequences that are not suspects, alternately."""
    evidence, everybody = state.evidence, Apart(list(state.running.due.values()), state.running.prefilling)
    suspects = [s for s in (*everybody.due, *everybody.prefilling) if s.id in evidence.suspects]
    if not suspects:
        return everybody
    has_others = len(everybody.due) + len(everybody.prefilling) > len(suspects)
    if has_others and not evidence.suspects_are_next:
        evidence.suspects_are_next = True
        return Apart(*([s for s in each if s not in suspects] for each in everybody))
    evidence.suspects_are_next = False
    first = min(suspects, key=lambda s: evidence.failed_last(s.id))
    return Apart(*([s for s in each if s is first] for each in everybody))
