"""Display of ``swarm generate`` on a terminal: the prompt before its answer, and the request's figures after it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.client.request import Prompt
    from swarm.client.results import Completion

_MAX_PROMPT = 1000  # characters shown of a prompt: its end
_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"

# A model may generate control characters that move a terminal's cursor or set its title: they are shown as symbols.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROL_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def is_terminal() -> bool:
    """Whether a person watches: both the answer and the messages appear on a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def replace_controls(text: str) -> str:
    return text.translate(_CONTROL_PICTURES)


def dim_prompt(prompt: Prompt, *, is_message: bool) -> str:
    """Return the text to show before the answer; empty for token ids, and where the terminal can't show it dimmed.

    A message has lines of its own, other prompts are continued on their last line.
    """
    if not isinstance(prompt, str) or not prompt or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return ""
    text = prompt if len(prompt) <= _MAX_PROMPT else "…" + prompt[-_MAX_PROMPT:]
    return f"{_DIM}{replace_controls(text)}{_NORMAL}" + ("\n" if is_message else "")


def format_figures(completion: Completion) -> str:
    """Return the figures of an answer in one line: tokens, tokens per second, time to the first token."""
    num_tokens, timings = completion.usage.num_tokens, [choice.timing for choice in completion.choices]
    first_s = min(timing.first_token_s for timing in timings)
    parts = ["1 token" if num_tokens == 1 else f"{num_tokens} tokens"]
    if first_s:
        # the first token of each answer comes with the prompt
        later, seconds = num_tokens - len(timings), max(timing.total_s for timing in timings) - first_s
        if later > 0 and seconds > 0:
            parts.append(f"{later / seconds:.1f} tokens/s")
        parts.append(f"first token after {first_s:.2f} s")
    return ", ".join(parts)
