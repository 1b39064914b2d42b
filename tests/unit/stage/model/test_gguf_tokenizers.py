"""Tokenizers of GGUF files give the tokens of the tokenizer that a file was made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from swarm.client.text.tokenizer import TextModel
from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.location import locate_model
from tests.gguf_headers import llama_tensors, write_file

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

CORPUS = [
    "The miller's daughter wouldn't sell 12345 loaves; she'd rather bake 7 more.",
    "Größe, naïveté and ÅNGSTRÖM: ça va? Καλημέρα κόσμε — 世界 🚀🚀",
    "def f(x):\n\treturn  x ** 2    # spaces\n\n\nprint(f(3))\r\n",
] * 3
TEXTS = [
    *CORPUS[:3],
    " leading", "trailing ", "  two  spaces  ", "\n", "\n\n \n", "1234567", "I'll you'RE", "e\u0301 composed é",
    "<|end|> in a text", "<0x0A>", "▁", "unseen ☃ letters ﷽",
]  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
SPECIAL = ["<|begin|>", "<|end|>", "<｜bars｜>"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))


def byte_level(split: str | None, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    pieces = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def sentence_pieces(*, prefix: bool) -> Tokenizer:
    """As the tokenizer.json of Llama 2 (with a prefix) and Gemma: pieces of all text, and bytes of unknown letters."""
    replace = normalizers.Replace(" ", "▁")
    normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else normalizers.Sequence([replace])
    )
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    learner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200))
    learned = json.loads(learner.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # sentencepiece numbers its tokens in the order of the merges
    words = [*("".join(merge) for merge in learned["merges"]), *(word for word in learned["vocab"] if len(word) == 1)]
    vocab = {word: number for number, word in enumerate(dict.fromkeys([*first, *words]))}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def words_of(tokenizer: Tokenizer) -> list[str]:
    return [str(tokenizer.id_to_token(number)) for number in range(tokenizer.get_vocab_size())]


def write_byte_level(tokenizer: Tokenizer, pre: str) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        words, added = words_of(tokenizer), tokenizer.get_added_tokens_decoder()
        kinds = [
            (gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED)
            if number in added
            else gguf.TokenType.NORMAL
            for number in range(len(words))
        ]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(words)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
        writer.add_bos_token_id(words.index("<|begin|>"))
        writer.add_eos_token_id(words.index("<｜bars｜>"))
        writer.add_chat_template(TEMPLATE)

    return change


def write_pieces(tokenizer: Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        words = words_of(tokenizer)
        merges = {
            "".join(merge): place for place, merge in enumerate(json.loads(tokenizer.to_str())["model"]["merges"])
        }
        kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        kinds += [gguf.TokenType.BYTE] * 256
        kinds += [gguf.TokenType.NORMAL] * (len(words) - len(kinds))
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(words)
        writer.add_token_scores([float(-merges.get(word, len(words))) for word in words])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return change


def open_file(
    folder: Path, size: int, change: Callable[[gguf.GGUFWriter], None], architecture: str = "llama"
) -> Checkpoint:
    tensors = llama_tensors() | {"token_embd.weight": (size, 8)}
    path = write_file(folder / "tiny.gguf", tensors, architecture, change)
    return Checkpoint.at(locate_model(str(path)))


def text_model(checkpoint: Checkpoint) -> TextModel:
    model = TextModel.load({asset.name: (checkpoint.folder / asset.name).read_bytes() for asset in checkpoint.assets})
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("pre", "split", "normalizer"),
    [("gpt-2", None, None), ("llama-bpe", LLAMA3, None), ("qwen2", QWEN2, normalizers.NFC())],
)
def test_byte_level_tokens_are_those_of_the_original(
    tmp_path: Path, pre: str, split: str | None, normalizer: Any
) -> None:
    original = byte_level(split, normalizer)
    model = text_model(open_file(tmp_path, original.get_vocab_size(), write_byte_level(original, pre)))
    for text in [*TEXTS, "".join(SPECIAL), "a<think>b"]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert list(model.encode(text, add_special_tokens=False)) == ids
        assert model.decode(ids) == original.decode(ids)
    assert model.tokenizer.get_vocab_size() == original.get_vocab_size()


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", True), ("gemma", False)])
def test_pieces_are_those_of_the_original(tmp_path: Path, architecture: str, prefix: bool) -> None:
    original = sentence_pieces(prefix=prefix)
    change = write_pieces(original)
    model = text_model(open_file(tmp_path, original.get_vocab_size(), change, architecture))
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert list(model.encode(text, add_special_tokens=False)) == ids
        assert model.decode(ids) == original.decode(ids)


def test_texts_begin_with_bos_where_the_model_expects_it(tmp_path: Path) -> None:
    """The flag decides; without it, sentencepiece's and Llama 3's models expect it, and others don't."""
    for pre, flag, expected in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ):
        original = byte_level(LLAMA3 if pre == "llama-bpe" else None)

        def change(writer: gguf.GGUFWriter, original: Tokenizer = original, pre: str = pre, flag: Any = flag) -> None:
            write_byte_level(original, pre)(writer)
            if flag is not None:
                writer.add_add_bos_token(flag)

        folder = tmp_path / f"{pre} {flag}"
        folder.mkdir()
        model = text_model(open_file(folder, original.get_vocab_size(), change))
        bos = original.token_to_id("<|begin|>")
        assert (model.encode("Hello")[0] == bos) is expected
        assert bos not in model.encode("Hello", add_special_tokens=False)


def test_the_chat_template_and_the_end_tokens_come_from_the_header(tmp_path: Path) -> None:
    original = byte_level(None)
    checkpoint = open_file(tmp_path, original.get_vocab_size(), write_byte_level(original, "gpt-2"))
    rendered = text_model(checkpoint).render_chat([{"role": "user", "content": "Hi"}])
    assert rendered == "<|begin|><|user|>Hi<|end|>"
    # the one that the file names, and a control token that is known to end answers
    ends = (original.token_to_id("<｜bars｜>"), original.token_to_id("<|end|>"))
    assert checkpoint.eos_token_ids == ends


def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path) -> None:
    original = byte_level(None)
    with pytest.raises(ModelError, match="'mystery', which is not supported"):
        open_file(tmp_path, original.get_vocab_size(), write_byte_level(original, "mystery"))


def test_a_file_without_a_vocabulary_serves_token_ids(tmp_path: Path) -> None:
    checkpoint = open_file(tmp_path, 12, lambda writer: writer.add_tokenizer_model("no_vocab"))
    assert checkpoint.assets == ()


def test_a_token_of_absurd_length_is_refused(tmp_path: Path) -> None:
    """The search for its merges would take time and memory that grow with the square of its length."""

    def words(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*"abcdefghijk", "a" * (1 << 20)])
        writer.add_token_scores([0.0] * 12)

    path = write_file(tmp_path / "tiny.gguf", change=words)
    with pytest.raises(ModelError, match=r"tiny\.gguf has a token of 1048576 letters; download it again"):
        locate_model(str(path))
