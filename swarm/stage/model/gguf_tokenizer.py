"""Tokenizer, chat template and end tokens of the model in a GGUF file, as the files that clients read.

The header has the vocabulary, the merges or scores, and a name for how text is split. The tokenizer is built of these
with the tokenizers package: transformers' own builder guesses where the name is unknown, cuts special tokens outside of
ASCII in pieces, and adds tokens that the model does not have. A name that is not known here is refused, because the
model would read other tokens than it was trained on.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from swarm.errors import ModelError
from swarm.stage.model.gguf_metadata import GgufMetadata
from swarm.stage.model.gguf_splits import FIRST_WHOLE, NORMALIZED, split_text

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_NORMAL = 1
_SPACE = "▁"
_MAX_TOKEN = 1024  # letters of a token's text; the work for a piece grows with the square of its length

# Texts of tokens that end an answer, whatever the file names as its end.
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_role|>",
    ]
)


def make_tokenizer(metadata: GgufMetadata, vocab_size: int) -> dict[str, str]:
    """Return the files of the tokenizer, by name; none if the file has no vocabulary. Raises ``ModelError``."""
    kind = metadata.value("tokenizer.ggml.model")
    if kind in (None, "no_vocab", "none"):
        return {}
    vocabulary = _Vocabulary(metadata, vocab_size)
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer = _sentence_pieces(vocabulary)
    else:
        raise vocabulary.unsupported(f"a tokenizer of the kind {str(kind)[:40]!r}")
    vocabulary.add_special_tokens(tokenizer)
    vocabulary.add_ends(tokenizer)
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": _as_json(_make_config(vocabulary))}


def end_tokens(metadata: GgufMetadata, vocab_size: int) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and control tokens that are known as such."""
    named = [metadata.token(name, vocab_size) for name in ("eos", "eot", "eom")]
    texts = metadata.texts("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    known = [
        number
        for number, (text, kind) in enumerate(zip(texts, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and text in _ENDS
    ]
    if {texts[number] for number in known} >= {"<|return|>", "<|end|>"}:
        # In the format of gpt-oss, <|end|> only ends a message of several.
        known = [number for number in known if texts[number] != "<|end|>"]
    return list(dict.fromkeys(token for token in (*named, *known) if token is not None and token < vocab_size))


class _Vocabulary:
    """The tokens of a file."""

    def __init__(self, metadata: GgufMetadata, vocab_size: int) -> None:
        self.metadata, self.vocab_size = metadata, vocab_size
        self.texts = metadata.texts("tokenizer.ggml.tokens")
        self.types = metadata.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(self.texts)
        self.split = str(metadata.value("tokenizer.ggml.pre") or "")
        if not self.texts or len(self.texts) > vocab_size or len(self.types) != len(self.texts):
            raise ModelError(
                f"{metadata.path} has {len(self.texts)} tokens and {len(self.types)} types of tokens, for an embedding "
                f"of {vocab_size}; download it again"
            )

        longest = max(map(len, self.texts))
        if longest > _MAX_TOKEN:
            raise ModelError(f"{metadata.path} has a token of {longest} letters; download it again")

    def unsupported(self, what: str) -> ModelError:
        return ModelError(f"{self.metadata.path} has {what}, which is not supported; use the model's safetensors files")

    def special(self, name: str) -> str | None:
        """Return the text of a special token such as ``bos``."""
        token = self.metadata.token(name, self.vocab_size)
        return None if token is None or token >= len(self.texts) else self.texts[token]

    def numbers(self, texts: list[str]) -> dict[str, int]:
        """Return the numbers of these texts. Of tokens with the same text, the first counts."""
        return {text: number for number, text in reversed(list(enumerate(texts)))}

    def build(self, numbers: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(BPE(vocab=numbers, merges=merges, **options))
        except Exception as error:  # noqa: BLE001 (the package raises Exception itself)
            raise ModelError(f"{self.metadata.path} has unusable merges of tokens ({str(error)[:120]})") from None

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the merges that the file lists; None if it lists none."""
        if self.metadata.value("tokenizer.ggml.merges") is None:
            return None
        pairs = [tuple(merge.split(" ")) for merge in self.metadata.texts("tokenizer.ggml.merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise ModelError(f"{self.metadata.path} has merges that are not of two tokens; download it again")
        return pairs  # type: ignore[return-value]

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Make the tokenizer find control and user-defined tokens as a whole."""
        known = tokenizer.get_vocab()
        special, others = [], []  # each list is added at once: every call builds the search for all of them again
        for number, (text, kind) in enumerate(zip(self.texts, self.types, strict=True)):
            if not text or known.get(text) != number:
                continue
            if kind in (_CONTROL, _UNKNOWN):
                special.append(AddedToken(text, normalized=False, special=True))
            elif kind == _USER_DEFINED:
                others.append(AddedToken(text, normalized=False, special=False))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(others)

    def adds(self, end: str) -> bool:
        """Whether texts get the token ``bos`` in front, or ``eos`` at their end."""
        flag = self.metadata.flag(f"tokenizer.ggml.add_{end}_token")
        if flag is None and end == "bos":
            flag = self.metadata.value("tokenizer.ggml.model") == "llama" or self.split in FIRST_WHOLE
        return bool(flag) and self.special(end) is not None

    def add_ends(self, tokenizer: Tokenizer) -> None:
        """Make the tokenizer put the tokens around a text that the model expects."""
        names = [name for name in ("bos", "eos") if self.adds(name)]
        if not names:
            return
        texts = {name: str(self.special(name)) for name in names}
        template = [*(f"{{{name}}}" for name in names if name == "bos"), "$A"]
        template += [f"{{{name}}}" for name in names if name == "eos"]
        tokens = [(f"{{{name}}}", self.metadata.token(name, self.vocab_size)) for name in texts]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Build a tokenizer whose tokens are sequences of bytes, each written as a letter."""
    letters = _byte_letters()
    spelled = set(letters.values())
    texts = [
        text if kind != _NORMAL or spelled.issuperset(text) else "".join(letters[byte] for byte in text.encode())
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True)
    ]
    merges = vocabulary.merges()
    splits = split_text(vocabulary.split)
    if merges is None or splits is None:
        what = "no list of merges" if merges is None else f"a way to split text named {vocabulary.split[:40]!r}"
        raise vocabulary.unsupported(what)
    tokenizer = vocabulary.build(
        vocabulary.numbers(texts), merges, fuse_unk=False, ignore_merges=vocabulary.split in FIRST_WHOLE
    )
    if vocabulary.split in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> dict[int, str]:
    """Return the letters that stand for bytes: the visible ones for themselves, then those from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


def _sentence_pieces(vocabulary: _Vocabulary) -> Tokenizer:
    """Build a tokenizer as of sentencepiece's BPE: spaces are letters, and unknown letters fall back to bytes."""
    metadata = vocabulary.metadata
    is_gemma = metadata.architecture.startswith("gemma")
    # Gemma's tokens of several spaces are written as spaces in some files
    texts = [_SPACE * len(text) if is_gemma and text and not text.strip(" ") else text for text in vocabulary.texts]
    numbers = vocabulary.numbers(texts)
    merges = vocabulary.merges()
    if merges is None:
        scores = metadata.numbers("tokenizer.ggml.scores")
        if is_gemma:
            scores = [-float(place) for place in range(len(texts))]  # the order counts, not the scores
        if len(scores) != len(texts):
            raise ModelError(f"{metadata.path} has {len(scores)} scores for {len(texts)} tokens; download it again")
        merges = _find_merges(texts, vocabulary.types, scores, numbers)
    unknown = vocabulary.special("unknown") or next(
        (text for text, kind in zip(texts, vocabulary.types, strict=True) if kind == _UNKNOWN), None
    )
    tokenizer = vocabulary.build(numbers, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix")
    has_prefix = not is_gemma if prefix is None else prefix
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else normalizers.Sequence([replace])
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _find_merges(
    texts: list[str], types: list[int], scores: list[float], numbers: dict[str, int]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, the ones of the best tokens first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for text, kind, score in zip(texts, types, scores, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        cuts = (cut for cut in range(1, len(text)) if text[:cut] in numbers)
        pairs = [(text[:cut], text[cut:]) for cut in cuts if text[cut:] in numbers]
        pairs.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in pairs]
    merges.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _make_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text = vocabulary.special(key)
        if text is not None:
            config[f"{name}_token"] = text
    config |= {f"add_{name}_token": vocabulary.adds(name) for name in ("bos", "eos")}
    templates = _templates(vocabulary.metadata)
    if templates:
        named = [{"name": name, "template": template} for name, template in templates.items()]
        config["chat_template"] = templates["default"] if list(templates) == ["default"] else named
    return config


def _templates(metadata: GgufMetadata) -> dict[str, str]:
    """Return the chat templates by name."""
    templates = {"default": metadata.value("tokenizer.chat_template")}
    for name in metadata.texts("tokenizer.chat_templates"):
        templates[name] = metadata.value(f"tokenizer.chat_template.{name}")
    return {name: template for name, template in templates.items() if isinstance(template, str)}


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
