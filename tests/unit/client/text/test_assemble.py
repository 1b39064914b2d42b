"""Pieces from tokens: numbers, texts, reasons, and what counts when a stop string is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.results import Piece
from swarm.client.text.assemble import PieceAssembler
from swarm.client.text.tokenizer import TextModel
from swarm.params import SamplingParams
from tests.integration.fake_broker import EOS, say, tokenizer_files

MODEL = TextModel.load(tokenizer_files())
assert MODEL is not None


def assembler(text: TextModel | None = MODEL, **params: object) -> PieceAssembler:
    checked = SamplingParams(**{"max_tokens": 1000, **params})  # type: ignore[arg-type]
    ends = frozenset() if checked.ignore_eos else frozenset({EOS})
    return PieceAssembler(checked, 0, ends | set(checked.stop_token_ids), None if text is None else text.detokenizer())


def run(made: PieceAssembler, tokens: list[int], reason: str = "length") -> list[Piece]:
    pieces = [piece for token in tokens for piece in made.push(token)]
    return pieces + made.finish("stop" if made.stop_at is not None else reason)


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_last_token_has_the_reason() -> None:
    """The max_tokens-th token waits for the end, so that it can say so; all others come at once."""
    made = assembler(max_tokens=2)
    first, second = say("ab")
    assert made.push(first) == [Piece(first, "a", 0)]
    assert made.push(second) == []
    assert made.finish("length") == [Piece(second, "b", 1, finish_reason="length")]


def test_an_ending_token_has_no_text() -> None:
    """Neither a special one nor an ordinary one that the caller has named; it counts as a token."""
    for end in (EOS, say("x")[0]):
        pieces = run(assembler(stop_token_ids=(end,)), [*say("ab"), end], "stop")
        assert text_of(pieces) == "ab"
        assert pieces[-1] == Piece(end, "", 2, finish_reason="stop")


def test_an_ending_token_that_does_not_end() -> None:
    """Before min_tokens it is a token like others, and its text is shown."""
    x = say("x")[0]
    pieces = run(assembler(stop_token_ids=(x,)), [x, *say("ab")])
    assert text_of(pieces) == "xab"
    assert [piece.token for piece in pieces[:3]] == [x, *say("ab")]


def test_an_end_without_a_token() -> None:
    """When nobody could know that a token was the last, the reason comes in a piece without one."""
    pieces = run(assembler(), say("ab"))
    assert pieces[-1] == Piece(None, "", 2, finish_reason="length")


def test_held_text_comes_with_the_end() -> None:
    """The beginning of a stop string that never came, and a broken character."""
    pieces = run(assembler(stop=("bcd",)), [*say("abc"), say("€")[0]])
    assert text_of(pieces) == "abc\ufffd"
    assert pieces[-1].finish_reason == "length"
    assert run(assembler(stop=("bcd",)), say("abc"))[-1].token == say("c")[0]


def test_a_stop_string_in_the_middle_of_a_token() -> None:
    """The token counts, for part of its text is shown; nothing behind it does."""
    made = assembler(stop=("lo",))
    pieces = run(made, [*say("a"), *say("hello"), *say("b")])
    assert text_of(pieces) == "ahel"
    assert [piece.token for piece in pieces] == [*say("a"), *say("hello")]
    assert (pieces[-1].finish_reason, made.stop_at) == ("stop", 2)


def test_a_stop_string_at_a_tokens_beginning() -> None:
    """The token before it was given already: the reason comes alone."""
    made = assembler(stop=("END",))
    pieces = run(made, say("aENDb"))
    assert pieces == [Piece(say("a")[0], "a", 0), Piece(None, "", 1, finish_reason="stop", stop="END")]
    assert made.stop_at == 1


def test_no_stop_before_min_tokens() -> None:
    """A stop string that ends too early is text."""
    made = assembler(stop=("a",), min_tokens=3)
    assert text_of(run(made, say("aaabac"))) == "aaab"
    assert made.stop_at == 4


def test_without_a_tokenizer() -> None:
    """Tokens and reasons, no text."""
    pieces = run(assembler(None, max_tokens=2), [7, 8])
    assert [(piece.token, piece.text, piece.finish_reason) for piece in pieces] == [(7, "", None), (8, "", "length")]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 261), max_size=30),
    st.lists(st.text(alphabet="helo é", min_size=1, max_size=4), max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_pieces_add_up(tokens: list[int], stops: list[str], max_tokens: int, ignore_eos: bool) -> None:
    """Texts join to the whole text before the stop string; tokens are a beginning of the tokens, numbered without
    holes; exactly the last piece has a reason; ``stop_at`` is the number of tokens given."""
    tokens = tokens[:max_tokens]
    if EOS in tokens and not ignore_eos:
        tokens = tokens[: tokens.index(EOS) + 1]
    made = assembler(stop=tuple(stops), max_tokens=max_tokens, ignore_eos=ignore_eos)
    pieces = run(made, tokens, "stop" if tokens and tokens[-1] == EOS and not ignore_eos else "length")
    assert MODEL is not None
    whole = MODEL.decode(tokens)
    cut = min((at for stop in stops if (at := whole.find(stop)) >= 0), default=None)
    if made.stop_at is None:
        assert cut is None
        assert text_of(pieces) == whole
    else:
        assert whole.startswith(text_of(pieces))
        assert not any(stop in text_of(pieces) for stop in stops)
        assert made.stop_at == len([piece for piece in pieces if piece.token is not None])
        assert pieces[-1].finish_reason == "stop"
    given_tokens = [piece.token for piece in pieces if piece.token is not None]
    assert given_tokens == tokens[: len(given_tokens)]
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
