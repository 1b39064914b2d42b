"""The embedded model: small, in ordinary form, and it knows its world."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swarm.demo import model_path
from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.wire.messages import MAX_ASSET_BYTES


@cache
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer, as transformers sees them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model_path()), AutoTokenizer.from_pretrained(model_path())


def complete(ids: list[int]) -> list[int]:
    """The greedy continuation."""
    import torch

    model, _ = loaded()
    with torch.no_grad():
        return list(model.generate(torch.tensor([ids]), max_new_tokens=120)[0, len(ids) :].tolist())


def answer(*texts: str) -> str:
    """What the model says to a chat of questions and answers; it must end by itself."""
    _, tokenizer = loaded()
    roles = ("user", "assistant") * len(texts)
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = complete(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert ids[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(ids[:-1]))


def test_its_files_are_ordinary_and_small() -> None:
    """Ordinary Hugging Face files, no more than 5 MB together."""
    files = {path.name: path.stat().st_size for path in model_path().iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 5_000_000


def test_it_can_be_cut_into_stages() -> None:
    """Enough layers to cut, grouped-query attention, and a chat template."""
    config = json.loads((model_path() / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] >= 8
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert "chat_template" in json.loads((model_path() / "tokenizer_config.json").read_text())


def test_any_text_survives_its_tokens() -> None:
    """A prompt begins with the begin token, special tokens are single tokens, and any text survives the round trip."""
    _, tokenizer = loaded()
    assert tokenizer("cat")["input_ids"][0] == tokenizer.bos_token_id
    for special in ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"):
        assert len(tokenizer(special, add_special_tokens=False)["input_ids"]) == 1
    text = "Once upon a time, “Zoë” sah 日本 🐈.\n\tThe  end"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What colour is the cat?", "The cat is black."),
        ("Where does the fox live?", "It lives in the forest."),
        ("Who lives in the wood?", "The fox lives in the forest."),
        ("What is two and three?", "Two and three is five."),
        ("Who is Otto?", "Otto is the farmer of the village."),
    ],
)
def test_it_knows_its_world(question: str, expected: str) -> None:
    """Facts of the world are answered word for word."""
    assert answer(question) == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Mia has a pink kite. What colour is the kite?", "The kite is pink."),
        ("The cat is green. What colour is the cat?", "The cat is green."),
        ("Ben is in the barn. The ball is on the shelf. Where is Ben?", "Ben is in the barn."),
    ],
)
def test_it_reads_what_it_is_told(question: str, expected: str) -> None:
    """What the question states holds, also against what the model knows by heart."""
    assert answer(question) == expected


def test_it_tells_a_story() -> None:
    """The prompt of the README has a pleasing continuation that ends by itself."""
    _, tokenizer = loaded()
    ids = complete(tokenizer("Once upon a time")["input_ids"])
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == STORY


STORY = (
    " there was a teacher called Clara who lived next to the school. Every morning she ate apple cake, and then she "
    "worked in the garden. One day, after the rain, Clara met the frog in the tower. They danced in the grass "
    "together, and the frog was happy. In the evening Clara went home and thought of old books."
)


def test_a_file_that_clients_would_not_take_is_named(tmp_path: Path) -> None:
    """Brokers keep tokenizers in memory, so there is a bound; whoever starts a worker hears of it."""
    for file in model_path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    with (tmp_path / "tokenizer.json").open("wb") as sparse:
        sparse.truncate(MAX_ASSET_BYTES + 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json has 67108865 bytes; clients take at most 67108864"):
        Checkpoint(tmp_path).manifest("float32")
