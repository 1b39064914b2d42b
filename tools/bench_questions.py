"""Answer the benchmarks' questions as a peer. Standard library alone: peers have interpreters of their own.

One JSON object per line, such as {"do": "generate", "prompts": [[…]], "new": 32}, answered with {"answer": seconds}.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod


class Contestant(ABC):
    """Another program with the whole model."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Generate; return seconds from the prompts to the last token, and the tokens."""

    @abstractmethod
    def prepare(self, shared: list[int], tails: list[list[int]]) -> float:
        """Compute the prompts ``shared + tail``, the shared part once; seconds."""

    @abstractmethod
    def go_on(self, new: int) -> float:
        """Draw ``new`` further tokens of each prepared prompt; seconds. At the next call all is as before."""

    def bandwidth(self) -> float:
        """Measure the bytes per second that are read from memory."""
        raise ValueError("this peer does not measure memory")


def answer_questions(contestant: Contestant) -> None:
    """Answer what stdin asks, until it ends."""
    for line in sys.stdin:
        print(json.dumps({"answer": _answer(contestant, json.loads(line))}), flush=True)


def _answer(contestant: Contestant, question: dict[str, object]) -> object:
    match question:
        case {"do": "generate", "prompts": list(prompts), "new": int(new)}:
            return contestant.generate(prompts, new)[0]
        case {"do": "tokens", "prompts": list(prompts), "new": int(new)}:
            return contestant.generate(prompts, new)[1]
        case {"do": "prepare", "shared": list(shared), "tails": list(tails)}:
            return contestant.prepare(shared, tails)
        case {"do": "go on", "new": int(new)}:
            return contestant.go_on(new)
        case {"do": "bandwidth"}:
            return contestant.bandwidth()
    raise ValueError(f"unknown question {question}")
