"""What ``swarm generate --json`` makes of an answer."""

from __future__ import annotations

import pytest

from swarm.cli.generate.generate import completion_data
from swarm.client.results import Choice, Completion, Usage
from swarm.wire.messages import Timing


@pytest.mark.parametrize(
    ("timing", "shown"),
    [
        (Timing(0.0, 0.2, 0.5, 0), (0.0, 0.2)),  # it began at once
        (Timing(0.0, 0.0, 0.5, 1), (None, None)),  # the broker was started again after its first token
    ],
)
def test_times_that_nobody_knows(timing: Timing, shown: tuple[float | None, float | None]) -> None:
    """A time that the client was told as 0, since it isn't known, is shown as null; one that is really 0, as 0."""
    choice = Choice(0, "a", (7,), "stop", timing)
    data = completion_data(Completion("r", (choice,), Usage(3, 1), 0))["timing"]
    assert data == {
        "queued_s": shown[0],
        "first_token_s": shown[1],
        "total_s": 0.5,
        "num_recomputed": timing.num_recomputed,
    }
