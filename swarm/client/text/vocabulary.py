"""Bounded encoding with a model's tokenizer, with control tokens or without.

``Tokenizer.encode`` holds the interpreter's lock while it runs, which is seconds for megabytes; ``encode_batch_fast``
releases it and returns the same ids. It needs about 100 bytes of memory per byte of text, so a text that cannot fit
into a context is refused first: by a proven bound where there is one, by counting the tokens of pieces, and finally by
the cost of tokenizing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from swarm.client.text.spelling import RenderedChat, Spelling
from swarm.errors import InvalidRequest, ModelError, PromptTooLong

PIECE_CHARS = 1 << 16  # characters that are counted at a time
# Tolerance: pieces are cut anywhere, which adds some tokens, so their sum counts only beyond this share of the limit.
TOLERANCE = 1.25
MAX_CHARS = 1 << 20  # characters tokenized in one call; or CHARS_PER_TOKEN per position if that is more
CHARS_PER_TOKEN = 16  # four times the usual ratio
_LARGE = 1 << 18  # characters; after tokenizing more, memory is returned to the system
_PROBE = "Once upon a time"
_PANIC = "PanicException"  # the library's exception, which cannot be imported
# Normalizers can shorten a text, at most by this factor in bytes: U+212A becomes K, U+1D400 becomes A.
_SHRINK_FACTORS = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
# pre-tokenizers that drop nothing
_LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


def load_tokenizer(content: bytes, name: str) -> Tokenizer:
    """Read a tokenizer. Raises ModelError."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ModelError(f"{name} can't be read: {error}") from error
    tokenizer.no_truncation()  # settings from the model's training, which would silently cut prompts here
    tokenizer.no_padding()
    _check_usable(tokenizer, name)
    return tokenizer


def _check_usable(tokenizer: Tokenizer, name: str) -> None:
    """Use the tokenizer once. A file with missing parts can be read and fails only in use: by a panic of the library,
    which is no Exception and would end more than a request. Raises ModelError."""
    try:
        with contextlib.suppress(Exception):  # the library raises ordinary exceptions for a text without tokens
            tokenizer.decode(tokenizer.encode(_PROBE).ids)
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise ModelError(f"{name} can't be used: {error}; fetch it again") from None


class Vocabulary:
    """Encodes texts with one model's tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling) -> None:
        self._tokenizer, self._spelling = tokenizer, spelling
        self.token_bytes = longest_token_bytes(tokenizer)
        # Control tokens that are matched in the normalized text have look-alikes that the original text does not show.
        self._is_matched_normalized = tokenizer.normalizer is not None and any(
            entry.normalized and entry.content in spelling.tokens
            for entry in tokenizer.get_added_tokens_decoder().values()
        )
        self._speller_lock = threading.Lock()
        self._speller: _SpelledTokenizer | None = None

    def encode(self, text: str, *, add_special_tokens: bool = False, most: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text, in which control tokens are recognised. Raises InvalidRequest for more than
        ``most``."""
        self.check_length(text, most)
        return tuple(_encode(self._tokenizer, text, add_special_tokens=add_special_tokens))

    def encode_input(self, text: str, second: str | None, *, most: int, cuts: bool) -> tuple[int, ...]:
        """Return the ids of a text, or of two that belong together, with the special tokens around them. With ``cuts``,
        only the first ids and the last special tokens of a text that has more than ``most``; otherwise that raises
        InvalidRequest."""
        if cuts:
            limit = max(MAX_CHARS, CHARS_PER_TOKEN * most)
            text, second = text[:limit], None if second is None else second[:limit]
        for part in (text, second or ""):
            self.check_length(part, None if cuts else most)
        [encoding] = self._tokenizer.encode_batch_fast([text if second is None else (text, second)])
        ids: list[int] = encoding.ids
        if cuts and len(ids) > most:
            mask = encoding.special_tokens_mask
            num_last = next((n for n, special in enumerate(reversed(mask)) if not special), 0)
            num_last = min(num_last, most - 1)
            ids = ids[: most - num_last] + ids[len(ids) - num_last :]
        return tuple(ids)

    def encode_rendered(self, rendered: RenderedChat, most: int | None = None) -> tuple[int, ...]:
        """Return the ids of a template's output: its own control tokens become such, all other text stays text."""
        plain = rendered.to_plain()
        self.check_length(plain, most)
        spelled = rendered.to_spelled()
        if not (self._is_matched_normalized or self._spelling.has_look_alikes(spelled)):
            return tuple(_encode(self._tokenizer, plain))
        with self._speller_lock:
            if self._speller is None:
                self._speller = _SpelledTokenizer(self._tokenizer, self._spelling)
        return self._speller.encode(spelled)

    def check_length(self, text: str, most: int | None) -> None:
        """Raise InvalidRequest if the text has more tokens than ``most``, is too long to count, or is not valid
        Unicode."""
        size = num_bytes(text)
        if most is None or len(text) <= most:  # counting would cost more than it saves
            return
        if self.token_bytes is not None and (fewest := -(-size // self.token_bytes)) > most:
            raise _too_long(f"at least {fewest}", fewest, most)
        num_tokens, limit = 0, max(MAX_CHARS, CHARS_PER_TOKEN * most)
        for start in range(0, len(text), PIECE_CHARS) if len(text) > PIECE_CHARS else ():
            num_tokens += len(_encode(self._tokenizer, text[start : start + PIECE_CHARS]))
            if num_tokens > TOLERANCE * most:
                raise _too_long(f"more than {most}", most + 1, most)
            if start > limit:
                raise InvalidRequest(f"the prompt has {len(text)} characters, at most {limit} are read", code="context")


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8. Raises InvalidRequest for an unpaired surrogate."""
    if text.isascii():
        return len(text)
    try:  # in pieces, since each call blocks other threads
        return sum(len(text[start : start + PIECE_CHARS].encode()) for start in range(0, len(text), PIECE_CHARS))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the prompt is not valid Unicode: {error.reason}", code="prompt") from error


def _too_long(count: str, least: int, most: int) -> PromptTooLong:
    return PromptTooLong(f"the prompt has {count} tokens; at most {most} fit", least)


class _SpelledTokenizer:
    """A second tokenizer of the same model, in which each control token has a secret word instead of its usual text.

    A secret word contains a random string, which is created when the model is loaded (see ``Spelling``). The rendered
    chat template contains secret words for its own control tokens. A message that contains the usual text of a control
    token is therefore encoded as plain text.
    """

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling) -> None:
        control = set(spelling.tokens)
        self._tokenizer = Tokenizer(tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (value := getattr(tokenizer, part)) is not None:
                setattr(self._tokenizer, part, value)
        self._originals: dict[int, int] = {}  # original ids by this tokenizer's ids
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        self._tokenizer.add_tokens([_spelled_token(entry, spelling, control) for _, entry in added])
        for original, entry in added:
            own = self._tokenizer.token_to_id(_spelled_token(entry, spelling, control).content)
            assert own is not None  # it was added above
            self._originals[own] = original
        self._forbidden = {original: entry.content for original, entry in added if entry.content in control}
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._forbidden = {token: text for token, text in self._forbidden.items() if text != unknown}

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text in which each control token is replaced by its secret word.

        Raises InvalidRequest if the model's vocabulary would turn plain text into a control token.
        """
        ids = _encode(self._tokenizer, text)
        forged_token = next((token for token in ids if token not in self._originals and token in self._forbidden), None)
        if forged_token is not None:  # its id may be 0
            text = self._forbidden[forged_token]
            raise InvalidRequest(f"this model's tokenizer has no other encoding for {text!r}: leave it out", "messages")
        return tuple(self._originals.get(token, token) for token in ids)


def _spelled_token(entry: AddedToken, spelling: Spelling, control: set[str]) -> AddedToken:
    return AddedToken(
        spelling.secret_word(entry.content) if entry.content in control else entry.content,
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized,
        special=False,
    )


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    if len(text) > _LARGE:
        del encoding
        release_memory()
    return ids


def release_memory() -> None:
    """Have the C library return unused memory to the system; otherwise it keeps much of a peak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Return the maximum number of bytes of text that one token can represent; None if there is no proven bound."""
    factor = _shrink_factor(_describe_part(tokenizer.normalizer))
    if factor is None or not _keeps_all(_describe_part(tokenizer.pre_tokenizer)):
        return None
    model = tokenizer.model
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not isinstance(model, BPE) or not _is_complete(model, vocabulary, _describe_part(tokenizer.pre_tokenizer)):
        return None
    if any(entry.lstrip or entry.rstrip for entry in tokenizer.get_added_tokens_decoder().values()):
        return None  # any amount of white space around it belongs to the token
    return factor * max(len(text.encode()) for text in vocabulary)


def _describe_part(part: Any) -> dict[str, Any]:
    """Return a normalizer or pre-tokenizer as it is written in tokenizer.json; empty for None."""
    if part is None:
        return {}
    described = json.loads(part.__getstate__())
    return described if isinstance(described, dict) else {"type": ""}


def _parts_of(described: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    """Return the steps of a sequence, or the single step if it is not a sequence."""
    if described.get("type") != "Sequence":
        return [described] if described else []
    return [inner for part in described[field] for inner in _parts_of(part, field)]


def _shrink_factor(described: Mapping[str, Any]) -> int | None:
    factor = 1
    for part in _parts_of(described, "normalizers"):
        if part["type"] == "Replace":
            before, after = part["pattern"].get("String"), part["content"]
            if before is None or len(after.encode()) < len(before.encode()):
                return None
        elif part["type"] in _SHRINK_FACTORS:
            factor *= _SHRINK_FACTORS[part["type"]]
        else:
            return None
    return factor


def _keeps_all(described: Mapping[str, Any]) -> bool:
    return all(
        part["type"] in _LOSSLESS_PRE_TOKENIZERS and part.get("behavior") != "Removed"
        for part in _parts_of(described, "pretokenizers")
    )


def _is_complete(model: BPE, vocabulary: Mapping[str, int], described: Mapping[str, Any]) -> bool:
    """Whether every byte of a text ends up in a token that is no longer than the longest in the vocabulary."""
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    is_bytes = any(part["type"] == "ByteLevel" for part in _parts_of(described, "pretokenizers"))
    if is_bytes:
        return all(letter in vocabulary for letter in _byte_letters())
    return False


def _byte_letters() -> list[str]:
    """Return the letters that stand for single bytes in GPT-2's encoding."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in shown] + [chr(256 + number) for number in range(256 - len(shown))]
