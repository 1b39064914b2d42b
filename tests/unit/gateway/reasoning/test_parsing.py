"""Thinking is split from the answer, the same however the text was cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest

from swarm.gateway.reasoning.format import AfterThinking, Phase, ReasoningDelta, ReasoningParser
from swarm.gateway.reasoning.formats import BUILT_IN

Split = tuple[str, str]  # the thinking, and the answer

THINK = [
    ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
    ("\n<think>Hm.</think>Yes.", False, ("Hm.", "Yes.")),
    ("Hm.\n</think>\n\nYes.\n", True, ("Hm.", "Yes.\n")),
    ("<think>\nHm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),  # the model repeats what the prompt ends with
    ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    ("</think>Yes.", True, ("", "Yes.")),
    ("Yes.", False, ("", "Yes.")),
    ("  Yes, <think>no</think>.", False, ("", "  Yes, <think>no</think>.")),
    ("<thinner>Yes.", False, ("", "<thinner>Yes.")),
    ("<thi", False, ("", "<thi")),
    ("a < b </thin </think>1 < 2</think>", True, ("a < b </thin", "1 < 2</think>")),
    ("a <think> b\n\n c</think>Yes.", True, ("a <think> b\n\n c", "Yes.")),
    ("It goes on \n\n", True, ("It goes on", "")),
    ("It goes on </thi", True, ("It goes on </thi", "")),
    ("<think></think><think>again</think>", False, ("", "<think>again</think>")),
    ("", False, ("", "")),
    (" \n", True, ("", "")),
]
GRANITE = [
    ("Here is my thought process: Hm.\nHere is my response:\nYes.", False, ("Hm.", "Yes.")),
    ("Here's my thought process:\nHm. Here is why.\n\nHere's my response: Yes.", False, ("Hm. Here is why.", "Yes.")),
    ("Here is my answer: Yes.", False, ("", "Here is my answer: Yes.")),
]
MAGISTRAL = [("[THINK]Hm [1].[/THINK]Yes.", False, ("Hm [1].", "Yes."))]
HEAD = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>"
CALL = '<|channel|>commentary to=functions.f <|message|>{"a": 1}<|call|>'
HARMONY = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        True,
        ("Hm.", "Yes."),
    ),
    ("<|channel|>final<|message|>Yes.\n<|return|>", True, ("", "Yes.\n")),
    ("<|channel|>final <|constrain|>json<|message|>{}", True, ("", "{}")),
    (
        f"<|channel|>analysis<|message|>One.\n<|end|>{HEAD}<|channel|>analysis<|message|> Two.<|end|>{HEAD}"
        "<|channel|>final<|message|>Yes.",
        True,
        ("One.\nTwo.", "Yes."),
    ),
    (
        f"<|channel|>analysis<|message|>Hm.<|end|>{HEAD}<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"a": 1}<|call|>',
        True,
        ("Hm.", CALL),
    ),
    (f'{HEAD} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>', True, ("", CALL)),
    (f"<|channel|>commentary<|message|>I look.<|end|>{HEAD}<|channel|>final<|message|>Yes.", True, ("", "I look.Yes.")),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", True, ("Hm.", "Yes.")),
    ("<|channel|>analysis<|message|>Hm <|x", True, ("Hm <|x", "")),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assis", True, ("Hm.", "")),
    ("Yes, without any channel.", True, ("", "Yes, without any channel.")),
    ("assist", True, ("", "assist")),
    ("to=" + "x" * 600, True, ("", "to=" + "x" * 600)),
    ("", True, ("", "")),
]
OTHERS = [
    ("seed", "<seed:think>Hm.</seed:think>Yes."),
    ("exaone", "<thought>\nHm.\n</thought>\n\nYes."),
    ("kimi", "◁think▷Hm.◁/think▷Yes."),
    ("command", "<|START_THINKING|>Hm.<|END_THINKING|>Yes."),
    ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes."),
]
CASES = [
    *(("think", *case) for case in THINK),
    *(("granite", *case) for case in GRANITE),
    *(("magistral", *case) for case in MAGISTRAL),
    *(("harmony", *case) for case in HARMONY),
    *((name, text, False, ("Hm.", "Yes.")) for name, text in OTHERS),
]


def parse(parser: ReasoningParser, texts: Sequence[str]) -> Split:
    results = [result for text in texts for result in parser.push(text)] + [*parser.finish()]
    assert all(result.text for result in results)
    thoughts = [result.text for result in results if isinstance(result, ReasoningDelta)]
    return "".join(thoughts), "".join(result.text for result in results if not isinstance(result, ReasoningDelta))


def cuts(text: str) -> Iterator[list[str]]:
    """The text as a whole, by characters, in two and in three at every place, and at random places."""
    yield [text]
    yield [*text, ""]
    for first in range(len(text)):
        yield [text[:first], text[first:]]
        for second in range(first, min(first + 12, len(text))):
            yield [text[:first], text[first:second], text[second:]]
    dice = random.Random(7)
    for _ in range(50):
        places = sorted(dice.randrange(len(text) + 1) for _ in range(6))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "is_opened", "split"), CASES)
def test_each_cut_of_the_text_gives_the_same(name: str, text: str, is_opened: bool, split: Split) -> None:
    for texts in cuts(text):
        assert parse(BUILT_IN[name]().parser(is_opened=is_opened), texts) == split, texts


def test_text_is_returned_as_soon_as_it_is_certain() -> None:
    """No mark can begin in it any more: white space and the beginning of a mark wait for what follows."""
    parser = BUILT_IN["think"]().parser(is_opened=True)
    told = [
        [result.text for result in parser.push(text)] for text in ("Hm", ", I", " ", "see", "<", "</", "think>A", "B")
    ]
    assert told == [["Hm"], [", I"], [], [" see"], [], ["<"], ["A"], ["B"]]


def test_the_phase_follows_the_text() -> None:
    parser = BUILT_IN["think"]().parser(is_opened=False)
    phases = []
    for text in ("<th", "ink>", "Hm", "</think>", "\n", "Yes"):
        parser.push(text)
        phases.append(parser.phase)
    assert phases == [Phase.UNDECIDED, *[Phase.THINKING] * 2, *[Phase.ANSWERING] * 3]


def test_a_format_reads_what_it_writes() -> None:
    """The texts that open thinking and end it, in a prompt or forced, are what the format looks for."""
    for name, make in BUILT_IN.items():
        made = make()
        assert made.name == name
        for rest in get_args(AfterThinking):
            end = made.end_of(rest)
            assert any(text in end.closing for text in end.texts)
        closing = made.end_of("text").closing
        if name == "harmony":
            assert parse(made.parser(is_opened=True), [f"{THOUGHT}Hm.{closing}Yes."]) == ("Hm.", "Yes.")
            continue
        assert parse(made.parser(is_opened=False), [f"{made.opening}Hm.{closing}Yes."]) == ("Hm.", "Yes.")
        assert made.start("ask" + made.opening) == "opened"
        assert made.start("ask" + made.opening + closing) == "none"
        assert made.start("ask") == "optional"


def test_a_prompt_that_has_begun_the_final_message_has_no_thinking() -> None:
    harmony = BUILT_IN["harmony"]()
    assert harmony.start("<|end|><|start|>assistant") == "opened"
    assert harmony.start("<|start|>assistant<|channel|>final<|message|>") == "none"
