"""Pauses between steps while layers are rebuilt.

Steps and replays take turns at the same stages. A step serves the sequences that are complete; a replay brings the
others closer to their next token. ``step_pause_s`` weighs the two.
"""

from __future__ import annotations

from math import sqrt

MAX_PAUSE_S = 1.0  # upper limit of a pause, and the time without progress after which replays count as blocked


def step_pause_s(step_s: float, num_complete: int, num_waiting: int, wait_s: float) -> float:
    """Return the pause after each step while ``num_waiting`` sequences are rebuilt and ``num_complete`` are not.

    ``step_s``: usual time of a step. ``wait_s``: expected time that a waiting sequence spends without a token in total.

    The rule minimizes the mean time until the next token, over all readers and all moments. For one reader, that is
    half the sum of the squared gaps between tokens, divided by the time. With a pause p after each step of time s, a
    replay that takes T alone ends after T (1 + s / p). Until then, complete sequences have gaps of s + p, and the gap G
    of each waiting sequence grows. So the sum of the squares is ::

        num_complete * (s + p) * T * (1 + s / p)  +  num_waiting * G**2,    with dG = T * d(s / p)

    and is least at p = s * sqrt(1 + 2 * num_waiting / num_complete * G / s). So replays get at least half of the time.
    They get more if more sequences wait, or wait longer. In the end a pause costs complete sequences nothing: the
    replay takes T from them whenever it runs.
    """
    if not num_waiting:
        return 0.0
    weight = 2 * num_waiting / max(1, num_complete)
    return min(MAX_PAUSE_S, sqrt(step_s * (step_s + weight * max(0.0, wait_s))))


def resumes_at_once(num_resuming: int, delay_s: float, step_s: float, num_waiting: int) -> bool:
    """Whether sequences that have become complete since the last step get their first tokens without a pause.

    They have waited about as long as the others. A step now saves each of them ``delay_s``, the time until the next
    occasion, and costs each of the others a step.
    """
    return num_resuming * delay_s >= num_waiting * step_s


def predict_steps_s(step_s: float, num_sequences: int, beside_s: float, wait_s: float) -> float:
    """Predict the time of the steps that run while the replays of all sequences but the first, which take ``beside_s``
    by themselves, are computed. ``wait_s``: see ``step_pause_s``."""
    total_s, num_resuming = 0.0, 0
    for num_complete in range(1, num_sequences):
        num_waiting, next_s = num_sequences - num_complete, beside_s / (num_sequences - 1)
        pause_s = step_pause_s(step_s, num_complete, num_waiting, wait_s)
        steps_s = next_s * step_s / pause_s if pause_s > 0 else 0.0
        num_resuming += 1
        if resumes_at_once(num_resuming, min(pause_s, next_s), step_s, num_waiting):
            steps_s, num_resuming = max(step_s, steps_s), 0
        total_s += steps_s
    return total_s
