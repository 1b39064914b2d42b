"""What ``swarm generate`` makes of an answer: with ``--json``, and on a terminal."""

from __future__ import annotations

import pytest

from swarm.cli.generate.generate import completion_data
from swarm.cli.generate.terminal import dim_prompt, format_figures
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


@pytest.mark.parametrize(
    ("timings", "num_tokens", "shown"),
    [
        ([Timing(0.0, 0.25, 2.25, 0)], 41, "41 tokens, 20.0 tokens/s, first token after 0.25 s"),
        (
            [Timing(0.0, 0.5, 2.25, 0), Timing(0.0, 0.25, 1.0, 0)],
            42,
            "42 tokens, 20.0 tokens/s, first token after 0.25 s",
        ),
        ([Timing(0.0, 0.25, 0.25, 0)], 1, "1 token, first token after 0.25 s"),
        ([Timing(0.0, 0.25, 0.25, 0)], 2, "2 tokens, first token after 0.25 s"),
        ([Timing(0.0, 0.0, 2.25, 1)], 41, "41 tokens"),  # the first token's time is unknown
    ],
)
def test_figures_of_an_answer(timings: list[Timing], num_tokens: int, shown: str) -> None:
    """The rate is that of the later tokens; what is unknown is left out."""
    choices = tuple(Choice(index, "a", (7,), "stop", timing) for index, timing in enumerate(timings))
    assert format_figures(Completion("r", choices, Usage(3, num_tokens), 0)) == shown


@pytest.mark.parametrize(
    ("prompt", "is_message", "shown"),
    [
        ("Once", False, "\x1b[2mOnce\x1b[22m"),
        ("Once\n\ttwice", True, "\x1b[2mOnce\n\ttwice\x1b[22m\n"),
        ("a\x1b]0;title\x07\x9b", False, "\x1b[2ma␛]0;title␇\ufffd\x1b[22m"),
        ("a" + "b" * 1000, False, f"\x1b[2m…{'b' * 1000}\x1b[22m"),
        ("", True, ""),
        ([1, 2], False, ""),
    ],
)
def test_a_dimmed_prompt(
    prompt: str | list[int], is_message: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only our own escapes reach the terminal, and of a long prompt its end."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert dim_prompt(prompt, is_message=is_message) == shown


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_prompt_that_cannot_be_dimmed_is_left_out(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    assert dim_prompt("Once", is_message=False) == ""
