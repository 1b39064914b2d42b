"""Many kinds of models: cut against whole, and the contract of bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm.errors import ModelError
from swarm.stage import attention, selfcheck
from tests.model.cutting import Cutter, Pipeline, random_tokens
from tests.model.models import load_whole

SERVED = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox"),
    *("mixtral", "qwen3_moe", "gpt_oss", "granite", "cohere2", "starcoder2", "smollm3"),
]
REFUSED = ["bloom", "falcon", "mamba", "qwen3_next", "llama4_text", "gpt2"]
# Loaded from a folder too: window, soft caps, sinks, experts stored one by one, other names of modules.
FROM_FOLDER = ["mistral", "gemma2", "gemma3_text", "gpt_neox", "mixtral", "gpt_oss", "qwen3"]


@pytest.mark.parametrize("kind", SERVED)
def test_served(kind: str) -> None:
    """The check at load accepts these kinds."""
    selfcheck.check_cut(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    """And refuses these, each with a reason."""
    with pytest.raises(ModelError, match=r"can't be served|not supported|can't build"):
        selfcheck.check_cut(AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    ("kind", "what"), [("gpt_oss", "sinks"), ("gemma2", "softcap"), ("mistral", "window"), ("gemma3_text", "window")]
)
def test_the_check_notices(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: attention that leaves out sinks, soft cap or window is refused by the check."""
    right = attention._How

    def partial(scale: float, window: Any, softcap: Any, sinks: Any) -> Any:
        given = {"window": window, "softcap": softcap, "sinks": sinks} | {what: None}
        return right(scale, given["window"], given["softcap"], given["sinks"])

    monkeypatch.setattr(attention, "_How", partial)
    selfcheck._difference.cache_clear()
    with pytest.raises(ModelError, match="something else than whole"):
        selfcheck.check_cut(AutoConfig.for_model(kind))
    selfcheck._difference.cache_clear()


@pytest.fixture(scope="module")
def folders(save: Any) -> Any:
    made: dict[str, Any] = {}

    def folder(kind: str) -> Any:
        if kind not in made:
            made[kind] = save(selfcheck._tiny(AutoConfig.for_model(kind)))
        return made[kind]

    return folder


def served(pipeline: Pipeline, tokens: list[int], chunk: int) -> torch.Tensor:
    pipeline.open(1, 2)
    pieces, stranger = [], random_tokens(90, seed=1, vocabulary=96)
    for start in range(0, len(tokens), chunk):
        part = (1, start, tokens[start : start + chunk])
        pieces.append(pipeline.logits(part, (2, start, stranger[start : start + 1]))[0])
    return torch.cat(pieces)


@pytest.mark.parametrize("kind", FROM_FOLDER)
def test_from_folder(kind: str, folders: Any) -> None:
    """Loaded from files and cut in three, logits are those of transformers' whole model."""
    folder = folders(kind)
    tokens = random_tokens(80, seed=5, vocabulary=96)
    with torch.inference_mode():
        expected = load_whole(folder)(torch.tensor([tokens]), use_cache=False).logits[0]
    actual = served(Cutter().cut(folder, (0, 1, 2, 4)), tokens, chunk=33)
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FROM_FOLDER)
def test_bits(kind: str, dtype: str, folders: Any) -> None:
    """The same bits in chunks of 1, 7, 64 and whole, over one stage and three, beside a stranger."""
    cutter, folder = Cutter(), folders(kind)
    tokens = random_tokens(80, seed=6, vocabulary=96)
    expected = served(cutter.cut(folder, (0, 4), dtype), tokens, chunk=80)
    for chunk in (1, 7, 64):
        assert torch.equal(served(cutter.cut(folder, (0, 4), dtype), tokens, chunk), expected), chunk
    assert torch.equal(served(cutter.cut(folder, (0, 1, 2, 4), dtype), tokens, 20), expected)
