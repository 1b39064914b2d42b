"""Sampling parameters: one checked value that travels unchanged from the client to the last stage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, get_args

import msgspec

from swarm.errors import InvalidRequest

# Priority classes by name. A priority is a number from -100 to 100; numbers in between are allowed, too.
PRIORITIES = {"high": 50, "normal": 0, "low": -50}

# Which proposers may guess an answer's tokens; the answer is the same in every mode.
SpeculationMode = Literal["auto", "off", "suffix", "draft"]
SPECULATION_MODES: tuple[SpeculationMode, ...] = get_args(SpeculationMode)

# What a request returns instead of tokens: the normalised last layer's output at the last position, its mean over all
# positions, or the scores of a classification head at the last position.
VectorKind = Literal["last", "mean", "scores"]

MAX_SEED = 2**63 - 1
MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 4096  # Characters of one.
MAX_BIASES = 1024
MAX_GRAMMAR = 256 << 10  # Characters.
MAX_CHOICES = 10_000
MAX_THINKING_ENDS = 16
MAX_THINKING_END = 64  # Characters of one.
MAX_CLOSING = 64  # Tokens.
MAX_IMAGES = 64
MAX_IMAGE_SIDE = 1 << 12  # Tokens.
MAX_IMAGE_TOKENS = 1 << 12  # Of an image: the first stage has memory for the work on one of these.
MAX_PIXEL_BYTES = 12 << 20  # Of all images of a request.

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf"]


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constraint on the answer's text. What ``text`` contains depends on ``kind``:

    - "json_schema": the schema as JSON.
    - "json_object": nothing; the answer is any JSON object.
    - "regex": the regular expression.
    - "choice": a JSON list of the possible answers.
    - "ebnf": a grammar in Lark's or llama.cpp's form.
    """

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)] = ""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Thinking at the beginning of an answer, which the prompt has opened.

    - ``ends``: texts of which each ends the thinking. A grammar applies after the token that completes one.
    - ``budget``: maximum number of tokens of the thinking. If it has not ended by then, the next tokens are
      ``closing``, whatever the model computes, and the answer follows. None: no limit.
    """

    ends: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_THINKING_END)], ...],
        msgspec.Meta(max_length=MAX_THINKING_ENDS),
    ]
    budget: int | None = None
    closing: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_CLOSING)] = ()


class ImageSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An image in a prompt: position ``start`` of the first of its ``rows`` × ``columns`` tokens, which have one token
    id, and its ``image_digest``."""

    start: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]
    columns: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether some of its tokens are at positions from ``start`` up to, not including, ``stop``."""
        return self.start < stop and start < self.stop


def image_digest(rows: int, columns: int, pixels: bytes) -> str:
    """Return what identifies an image of this many tokens: the SHA-256 of its rows and columns, four bytes each,
    little-endian, and its pixels. Images of one colour have the same pixels in every shape."""
    digest = hashlib.sha256(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))
    digest.update(pixels)
    return digest.hexdigest()


def image_content(images: Sequence[ImageSpan], start: int, stop: int) -> bytes:
    """Return what identifies the images of which positions from ``start`` up to ``stop`` have tokens, because token ids
    do not; empty if there are none."""
    seen = (image for image in images if image.overlaps(start, stop))
    return b"".join(bytes.fromhex(image.digest) + image.start.to_bytes(4, "little") for image in seen)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of sampling. The defaults are greedy decoding, so answers are reproducible unless the caller asks
    otherwise.

    - ``max_tokens``: the answer ends after this number of tokens. ``min_tokens``: it does not end before.
    - ``temperature``: 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    - ``repetition_penalty`` divides logits (1 is off); ``presence_penalty`` and ``frequency_penalty`` are subtracted (0
      is off). ``logit_bias`` maps token ids to values that are added to their logits.
    - ``logprobs``: return the chosen token's log probability and this number of alternatives; None: neither.
    - ``n``: number of continuations, each with a seed derived from ``seed``. ``seed`` None: the client draws one.
    - ``stop``: strings that end the text and are not part of it. ``stop_token_ids``: tokens that end it.
    - ``ignore_eos``: do not end at the model's end-of-sequence tokens.
    - ``grammar``: only tokens that it allows are drawn, and the answer ends only where the grammar may.
    - ``thinking``: the answer begins with thinking, to which the grammar does not apply.
    - ``vector``: the answer is a vector of this kind; no token is drawn.
    - ``prompt_logprobs``: return the log probability of each token of the prompt but the first, and this number of
      alternatives; None: neither. Then ``max_tokens`` may be 0: no token is drawn.
    - ``adapter``: name of the adapter that changes the model's layers; empty: none.
    - ``images``: the images in the prompt, in its order; ``Submit`` has their pixels.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[_TokenId, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[_TokenId, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    vector: VectorKind | None = None
    prompt_logprobs: int | None = None
    adapter: str = ""
    images: Annotated[tuple[ImageSpan, ...], msgspec.Meta(max_length=MAX_IMAGES)] = ()

    @property
    def max_answer(self) -> int:
        """Maximum number of tokens that the answer can have."""
        return self.max_tokens if self.vector is None else 0

    @property
    def has_rules(self) -> bool:
        """Whether the tokens drawn so far decide which may be drawn next."""
        return self.grammar is not None or self.thinking is not None

    @property
    def needs_new_stages(self) -> bool:
        """Whether stages of older protocols refuse a sequence with these parameters."""
        asks = self.thinking is not None or self.vector is not None or self.prompt_logprobs is not None
        return asks or bool(self.adapter) or bool(self.images)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check(self) -> None:
        """Raise :class:`InvalidRequest` that names the first invalid field, its value and the allowed range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails every comparison.
                raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", code=name)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0; for greedy decoding set temperature to 0", code="top_p")
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0 (1 is off)", code="repetition_penalty")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", code="min_tokens"
            )
        self._check_stops()
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias takes at most {MAX_BIASES} tokens", code="logit_bias")
        for token, bias in self.logit_bias.items():
            if not -1000.0 <= bias <= 1000.0:
                raise InvalidRequest(
                    f"logit_bias[{token}] must be between -1000 and 1000, not {bias}", code="logit_bias"
                )
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        if self.thinking is not None:
            self._check_thinking(self.thinking)
        self._check_images()
        self._check_answer()

    def _check_answer(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens must be between 1 and 1000000, not 0, without prompt_logprobs", code="max_tokens"
            )
        if self.vector is not None and self.prompt_logprobs is not None:
            raise InvalidRequest("a request for a vector has no prompt_logprobs", code="prompt_logprobs")
        if not self.max_answer and self.n != 1:
            raise InvalidRequest(f"n must be 1 if no token is drawn, not {self.n}", code="n")

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            num = len(getattr(self, name))
            if num > MAX_STOPS:
                raise InvalidRequest(f"{name} takes at most {MAX_STOPS}, not {num}", code=name)
        if any(not stop for stop in self.stop):
            raise InvalidRequest("a stop string must not be empty", code="stop")
        if any(len(stop) > MAX_STOP_CHARS for stop in self.stop):
            raise InvalidRequest(f"a stop string has at most {MAX_STOP_CHARS} characters", code="stop")

    def _check_images(self) -> None:
        if any(image.stop > after.start for image, after in pairwise(self.images)):
            raise InvalidRequest("images must be in the order of their places, and must not overlap", code="images")
        for number, image in enumerate(self.images, 1):
            if image.num_tokens > MAX_IMAGE_TOKENS:
                size = f"{image.rows} × {image.columns} tokens"
                raise InvalidRequest(
                    f"images: image {number} has {size}, an image may have {MAX_IMAGE_TOKENS}: shrink it", code="images"
                )

    def _check_thinking(self, thinking: Thinking) -> None:
        if not 1 <= len(thinking.ends) <= MAX_THINKING_ENDS:
            raise InvalidRequest(
                f"thinking.ends takes 1 to {MAX_THINKING_ENDS} texts, not {len(thinking.ends)}", code="thinking"
            )
        if not all(1 <= len(end) <= MAX_THINKING_END for end in thinking.ends):
            raise InvalidRequest(f"a text of thinking.ends has 1 to {MAX_THINKING_END} characters", code="thinking")
        if len(thinking.closing) > MAX_CLOSING:
            raise InvalidRequest(
                f"thinking.closing takes at most {MAX_CLOSING} tokens, not {len(thinking.closing)}", code="thinking"
            )
        if thinking.budget is not None and not (0 <= thinking.budget <= 1_000_000 and thinking.closing):
            raise InvalidRequest(
                "thinking.budget must be between 0 and 1000000, and needs closing tokens", code="thinking"
            )

    def _check_grammar(self, grammar: Grammar) -> None:
        """Check everything that does not need the model; the text is checked where the tokenizer is available."""
        if len(grammar.text) > MAX_GRAMMAR:
            raise InvalidRequest(f"grammar has {len(grammar.text)} characters, at most {MAX_GRAMMAR}", code="grammar")
        if self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos can't be combined with a grammar, which defines where the answer ends", code="ignore_eos"
            )


# The upper bounds are far above any use; they keep arithmetic finite and one request from monopolising the machine.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, 1_000_000),
    ("min_tokens", 0, 1_000_000),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 1_000_000),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_N),
    ("seed", 0, MAX_SEED),
)
