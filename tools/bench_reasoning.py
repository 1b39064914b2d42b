#!/usr/bin/env python3
"""Time what thinking costs per token: splitting it from the answer at the gateway, beside the same answer without a
split, and following it on the last stage, where its end and its budget are decided. Times are the thread's own."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import median

from bench_lib import note, processor

from swarm.client.results import Piece
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion_request import ToolOptions
from swarm.gateway.reasoning.format import ReasoningParser
from swarm.gateway.reasoning.formats import BUILT_IN
from swarm.gateway.tool_calls.hermes import hermes
from swarm.params import SamplingParams, Thinking
from swarm.stage.engine.thinking import ThinkingReaders
from swarm.stage.executor import SampleJob

WORDS = ("so", " the", " answer", " is", ",", "\n\n", " <", " a", " b", ">", " if", ".", " then", " 4", "2", "\n")
NAMES = ("think", "harmony", "granite")


def answer(name: str, num_tokens: int) -> list[str]:
    """The texts of an answer's tokens, half of them thinking."""
    dice, made = random.Random(1), BUILT_IN[name]()
    opening = "<|channel|>analysis<|message|>" if name == "harmony" else made.opening
    half = [dice.choice(WORDS) for _ in range(num_tokens // 2)]
    return [opening, *half, made.end_of("text").closing, *half]


def split_us(texts: list[str], make_parser: Callable[[], ReasoningParser | None]) -> float:
    """Microseconds per token of assembling an answer."""
    pieces = [Piece(number, text, number) for number, text in enumerate(texts)]
    assembler = AnswerAssembler("r", ToolOptions(), hermes({}), reasoning=make_parser)
    began = time.thread_time()
    for piece in pieces:
        assembler.add(piece)
    return (time.thread_time() - began) / len(pieces) * 1e6


def follow_us(num_before: int, num_tokens: int = 200) -> float:
    """Microseconds per token of following an answer that already has ``num_before`` tokens."""
    params = SamplingParams(thinking=Thinking(("</think>",), 1_000_000, (5,)))
    readers, history = ThinkingReaders(lambda token: b" word"), [token % 50_000 for token in range(100 + num_before)]
    readers.read(1, SampleJob(0, params, 1, history, 100))
    began = time.thread_time()
    for number in range(num_tokens):
        history.append(number)
        readers.read(1, SampleJob(0, params, 1, history, 100))
    return (time.thread_time() - began) / num_tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = range(parser.parse_args().rounds)
    note(processor())
    result: dict[str, float] = {}
    for name in NAMES:
        texts, made = answer(name, 4000), BUILT_IN[name]()
        result[f"split_{name}_us"] = median(
            split_us(texts, lambda made=made: made.parser(is_opened=True)) for _ in rounds
        )  # type: ignore[misc]
    result["no_split_us"] = median(split_us(answer("think", 4000), lambda: None) for _ in rounds)
    for num_before in (0, 1000, 10_000):
        result[f"stage_after_{num_before}_us"] = median(follow_us(num_before) for _ in rounds)
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
