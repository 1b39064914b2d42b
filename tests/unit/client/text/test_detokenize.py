"""Text from tokens, piece by piece: the same text as from the whole, and stop strings wherever the cuts are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from swarm.client.text.detokenize import Detokenizer, StopMatcher
from swarm.client.text.tokenizer import TextModel
from tests.integration.fake_broker import say, tiny_tokenizer, tokenizer_files

DEMO = Path(__file__).parents[4] / "swarm" / "demo" / "village"


@cache
def text_model() -> TextModel:
    model = TextModel.load(tokenizer_files())
    assert model is not None
    return model


@cache
def demo_model() -> TextModel:
    model = TextModel.load({"tokenizer.json": (DEMO / "tokenizer.json").read_bytes()})
    assert model is not None
    return model


def pieces_of(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    """Every token by itself, characters of several bytes cut in between: joined, it is the text; no half characters."""
    model = text_model()
    tokens = list(model.tokenizer.encode(text, add_special_tokens=False).ids)
    pieces = pieces_of(model.detokenizer(), tokens)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 300)))
def test_any_tokens_give_the_text_of_the_whole(tokens: list[int]) -> None:
    """Also when the bytes are no valid text, with special tokens and unknown ids between them."""
    model = text_model()
    assert "".join(pieces_of(model.detokenizer(), tokens)) == model.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_demo_models_tokenizer(data: st.DataObject) -> None:
    """The same with the tokenizer that ships."""
    model = demo_model()
    tokens = data.draw(st.lists(st.integers(0, model.tokenizer.get_vocab_size() + 5)))
    assert "".join(pieces_of(model.detokenizer(), tokens)) == model.decode(tokens)


def test_text_is_not_held_back_without_need() -> None:
    """Each byte of plain text is shown at once; a character of four bytes with its last one."""
    detokenizer = text_model().detokenizer()
    assert [detokenizer.push(token) for token in say("ab🙂c")] == ["a", "b", "", "", "", "🙂", "c"]


def test_invalid_bytes_are_shown_in_the_end() -> None:
    """A broken character is held while it could still be completed, and shown as what it is when it can't."""
    detokenizer = text_model().detokenizer()
    first = say("€")[0]
    assert detokenizer.push(first) == ""
    assert detokenizer.push(say("x")[0]) == "\ufffdx"
    assert detokenizer.push(first) == ""
    assert detokenizer.finish() == "\ufffd"


def test_endless_invalid_bytes_do_not_hold_everything_back() -> None:
    """At most three replacement characters wait: what could still become one character."""
    detokenizer = text_model().detokenizer()
    continuation = say("€")[1]
    shown = sum(len(detokenizer.push(continuation)) for _ in range(100))
    assert shown == 97
    assert detokenizer.finish() == "\ufffd" * 3


def sentencepiece_like() -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer with byte fallback and a space mark that is stripped at the beginning."""
    words = ["▁one", "▁two", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, vocab


def test_spaces_and_byte_fallback() -> None:
    """A space that only a text's first word loses is kept elsewhere; characters come whole."""
    tokenizer, vocab = sentencepiece_like()
    detokenizer = Detokenizer(lambda ids: str(tokenizer.decode(list(ids))), lambda _: False)
    euro = [vocab[f"<0x{byte:02X}>"] for byte in "€".encode()]
    pieces = pieces_of(detokenizer, [vocab["▁one"], vocab["▁two"], *euro, *euro, vocab["▁one"]])
    assert pieces == ["one", " two", "", "", "€", "", "", "€", " one", ""]


def test_a_byte_run_that_turns_out_invalid() -> None:
    """What was given stays given; nothing is given twice."""
    tokenizer, vocab = sentencepiece_like()
    detokenizer = Detokenizer(lambda ids: str(tokenizer.decode(list(ids))), lambda _: False)
    tokens = [vocab[f"<0x{byte:02X}>"] for byte in "€".encode() + b"\xff"] + [vocab["▁one"]]
    assert "".join(pieces_of(detokenizer, tokens)) == "€\ufffd one"


# --- stop strings -----------------------------------------------------------------------------------------------------


def reference(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """Character by character: the first stop string to be complete, the longest of those that are."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], min(starts)
    return text, None


_letters = st.text(alphabet="abé", max_size=40)
_stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.lists(_letters), _stops)
def test_stops_do_not_depend_on_the_cuts(pieces: list[str], stops: list[str]) -> None:
    """Whatever the pieces: the text before the first complete stop string, and what is shown is never taken back."""
    matcher = StopMatcher(tuple(stops))
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
    assert (shown, matcher.found_at) == reference("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(_letters, _stops)
def test_no_more_is_held_back_than_a_stop_string_may_need(text: str, stops: list[str]) -> None:
    """What is held is the beginning of a stop string, and the longest such."""
    matcher = StopMatcher(tuple(stops))
    shown = matcher.push(text)
    if matcher.found_at is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[i:]) for stop in stops for i in range(len(shown)))


def test_the_tiny_tokenizer_is_what_the_tests_need() -> None:
    """Merges exist, so tokens of several characters occur; so do single bytes."""
    assert len(say("hello")) == 1
    assert len(say("é")) == 2
    assert tiny_tokenizer().token_to_id("</s>") == 1


def marked_model() -> TextModel:
    """With two special tokens more, one of them of characters that bytes can't be mistaken for."""
    tokenizer = Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])
    tokenizer.add_special_tokens(["<|tag|>", "<｜sep▁x｜>"])
    model = TextModel.load({"tokenizer.json": tokenizer.to_str().encode()})
    assert model is not None
    return model


def test_special_tokens_that_are_asked_for_are_seen() -> None:
    """Those named stand in the text; all others stay silent, as without asking."""
    model = marked_model()
    tag, sep = model.added["<|tag|>"], model.added["<｜sep▁x｜>"]
    assert {tag, sep} <= set(model.silent)
    tokens = [tag, *say("é"), sep, 0, *say("x"), tag]
    assert "".join(pieces_of(model.detokenizer(), tokens)) == "éx"
    assert "".join(pieces_of(model.detokenizer((tag,)), tokens)) == "<|tag|>éx<|tag|>"
    assert "".join(pieces_of(model.detokenizer((tag, sep)), tokens)) == "<|tag|>é<｜sep▁x｜>x<|tag|>"
    assert [model.detokenizer((tag,)).push(tag), model.detokenizer((sep,)).push(tag)] == ["<|tag|>", ""]
