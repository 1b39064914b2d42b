"""Many kinds of models: cut against whole, from checkpoints of every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm.errors import ModelError
from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention import options
from swarm.stage.engine import model_kernels, selfcheck
from swarm.stage.engine.kernel_report import describe_kernels
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.matmul.linears import choose_kernel, is_efficient
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.rope import RopeTable
from swarm.stage.modules import attention as modules_attention
from swarm.wire.messages import LayerRange
from tests.model.as_transformers import TOKENS, check_greedy, logits_beside_a_stranger
from tests.model.cutting import Cutter, nothing
from tests.model.float64 import truth_of
from tests.model.models import ADAPTED, ARCHITECTURES, load_whole, named_config

SERVED = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox"),
    *("mixtral", "qwen3_moe", "gpt_oss", "granite", "cohere2", "starcoder2", "smollm3"),
]
REFUSED = ["inkling_text", "qwen4_exp_text", "big_bird"]


@pytest.mark.parametrize("kind", [*SERVED, *ADAPTED])
def test_served(kind: str) -> None:
    """The check at load accepts these kinds."""
    assert set(ARCHITECTURES) <= set(SERVED)
    selfcheck.check_cut(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    """And refuses these, each with a reason."""
    with pytest.raises(ModelError, match=r"can't be served|not supported|can't build"):
        selfcheck.check_cut(AutoConfig.for_model(kind))


def _replace_options(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """Let attention by the model's modules and by ours make its options so."""
    for module in (attention, modules_attention):
        monkeypatch.setattr(module, "AttentionOptions", make)


@pytest.mark.parametrize(
    ("kind", "what"), [("gpt_oss", "sinks"), ("gemma2", "softcap"), ("mistral", "window"), ("gemma3_text", "window")]
)
def test_the_check_notices(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: attention that leaves out sinks, soft cap or window is refused by the check."""
    right = options.AttentionOptions

    def partial(scale: float, window: Any, softcap: Any, sinks: Any) -> Any:
        given = {"window": window, "softcap": softcap, "sinks": sinks} | {what: None}
        return right(scale, given["window"], given["softcap"], given["sinks"])

    _replace_options(monkeypatch, partial)
    selfcheck._difference.cache_clear()
    with pytest.raises(ModelError, match="something else than whole"):
        selfcheck.check_cut(AutoConfig.for_model(kind))
    selfcheck._difference.cache_clear()


FURTHER: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True, "multi_query": False, "parallel_attn": False},
    "phi3": {
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 128,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + n for n in range(48)]},
    },
    "llama": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
}


ADAPTED_AND_FURTHER = [*((kind, {}) for kind in ADAPTED), *FURTHER.items()]
ALL_DTYPES = ("float32", "bfloat16")
# Without an instruction for bfloat16, torch takes up to half a minute for one kind. One stands for the others: torch's
# products and attention in bfloat16 are the same for all, and what differs between kinds is computed in float32.
IN_BFLOAT16_BY_TORCH = "mpt"


@pytest.mark.parametrize(("kind", "changes"), ADAPTED_AND_FURTHER)
def test_adapted_kinds_in_bfloat16(kind: str, changes: dict[str, Any]) -> None:
    """Kinds with adapters, and unusual positions: near to transformers in bfloat16, too, by our kernels and by torch's,
    and with the same bits cut into stages and chunks as whole."""
    config = AutoConfig.for_model(kind, **changes)
    own = native.library() is not None
    selfcheck.check_kernels(config, "bfloat16")
    assert (native.library() is not None) == own  # they were not rejected
    assert all(selfcheck.same_bits(config, dtype) for dtype in ALL_DTYPES)
    with native.disabled("to compare"):
        dtypes = ALL_DTYPES if not own or kind == IN_BFLOAT16_BY_TORCH else ALL_DTYPES[:1]
        assert all(selfcheck.same_bits(config, dtype) for dtype in dtypes)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "changes"), ADAPTED_AND_FURTHER)
def test_adapted_kinds_in_bfloat16_by_torch(kind: str, changes: dict[str, Any]) -> None:
    with native.disabled("to compare"):
        assert selfcheck.same_bits(AutoConfig.for_model(kind, **changes), "bfloat16")


def test_long_factors_serve_all_lengths(save: Any) -> None:
    """A model whose context is longer than its original one takes ``longrope``'s long factors, as transformers does for
    a sequence beyond the original context; another one the short factors."""
    factors = {"long_factor": [1.0 + n for n in range(8)], "short_factor": [1.0] * 8, "type": "longrope"}
    for original in (64, 1024):
        changes = {"original_max_position_embeddings": original, "rope_scaling": factors}
        folder = save(named_config("phi3", head_dim=16, **changes))
        truth = truth_of(folder, TOKENS)
        assert truth.off(logits_beside_a_stranger(Cutter().cut(folder, (0, 3, 6)))) < truth.bound


@pytest.fixture(scope="module")
def folders(save: Any) -> Callable[[str, torch.dtype], Path]:
    """Saved models of the named kinds, in a dtype."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(kind: str, dtype: torch.dtype = torch.float32) -> Path:
        if (kind, dtype) not in made:
            made[kind, dtype] = save(named_config(kind), dtype=dtype)
        return made[kind, dtype]

    return folder


NUM_NEW = 30


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *ADAPTED])
def test_logits_equal_the_whole_models(kind: str, folders: Any) -> None:
    """Loaded from files and cut in two or five, logits are as near to the model's in float64 as float32 can be: within
    what its roundings make of this model, on any processor (``float64.py`` says how that is known). So are those of
    transformers' whole model in float32."""
    truth = truth_of(folders(kind), TOKENS)
    assert truth.bound < 1e-4  # a model that blurs more than that would show nothing
    with torch.inference_mode():
        whole = load_whole(folders(kind))(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert truth.off(whole) < truth.bound
    cutter = Cutter()
    for lines in ((0, 3, 6), (0, 1, 2, 3, 5, 6)):
        assert truth.off(logits_beside_a_stranger(cutter.cut(folders(kind), lines))) < truth.bound, lines


def _of_scores(**changes: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Attention whose scores are treated otherwise than the model says."""
    right = options.AttentionOptions

    def wrong(scale: float, window: Any, softcap: Any, sinks: Any) -> Any:
        said = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return right(**said | {name: change(said[name]) for name, change in changes.items() if said[name] is not None})

    return lambda monkeypatch: _replace_options(monkeypatch, wrong)


def _of_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are stretched by a thousandth."""

    def wrong(
        table: RopeTable, _: object, like: torch.Tensor, length: int, which: tuple[object, ...]
    ) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(length).unsqueeze(0) * 1.001
        return tuple(part[0].clone() for part in table.inner(like, positions, *which))

    monkeypatch.setattr(RopeTable, "_extend", wrong)


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("llama", _of_scores(scale=lambda scale: scale * 1.001)),
        ("llama", _of_rotation),
        ("gemma2", _of_scores(scale=lambda scale: scale * 1.001)),
        ("gemma2", _of_scores(softcap=lambda softcap: softcap * 1.001)),
        ("gemma2", _of_scores(window=lambda window: window + 1)),
        ("gemma2", _of_rotation),
        ("gpt_oss", _of_scores(sinks=lambda sinks: sinks + 0.001)),
    ],
    ids=["llama-scale", "llama-rotation", "gemma2-scale", "gemma2-softcap", "gemma2-mask", "gemma2-rotation", "sinks"],
)
def test_small_mistakes_are_beyond_what_float32_gives(
    kind: str, mistake: Callable[[pytest.MonkeyPatch], None], folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a thousandth too much, or one position too many, is ten times further off than the bound."""
    for check in ("check_cut", "check_kernels"):
        monkeypatch.setattr(model_kernels, check, nothing)  # they would notice before we do
    mistake(monkeypatch)
    truth = truth_of(folders(kind), TOKENS)
    off = truth.off(logits_beside_a_stranger(Cutter().cut(folders(kind), (0, 3, 6))))
    assert off > 10 * truth.bound, off / truth.bound


def greedy_cases() -> list[object]:
    """Logits of every kind are compared above; of kinds with adapters, one of each sort of positions is enough here."""
    few = {"gpt2", "gptj", "bloom", "llama4_text"}
    long = [pytest.param(kind, marks=() if kind in few else pytest.mark.long) for kind in ADAPTED]
    return [*ARCHITECTURES, *long]


@pytest.mark.parametrize("kind", greedy_cases())
def test_greedy_tokens_equal_generate(kind: str, folders: Any) -> None:
    """Cut in three, thirty greedy tokens are those of transformers' ``generate``, as far as these are well-defined: up
    to the first where the two best scores are nearer to each other than the two computations need to be."""
    tokens = check_greedy(load_whole(folders(kind)), Cutter().cut(folders(kind), (0, 1, 3, 6)), NUM_NEW)
    assert len(set(tokens)) > len(tokens) // 5  # it says something


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_dtypes_of_checkpoints(kind: str, stored: str, folders: Any) -> None:
    """A checkpoint of each dtype runs in the dtype that ``auto`` chooses (a CPU computes float16 in float32) and in
    each dtype that a CPU computes. Its logits are near the logits of the stored weights in float32 (on the average: a
    row may take another expert), and have the same bits in chunks."""
    folder = folders(kind, getattr(torch, stored))
    with torch.inference_mode():
        expected = load_whole(folder)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    good = stored == "float32" or (stored == "bfloat16" and is_efficient(torch.device("cpu"), torch.bfloat16))
    for dtype, off in (("auto", None), ("float32", 1e-5), ("bfloat16", 0.2)):
        pipeline = Cutter().cut(folder, (0, 2, 6), dtype)
        (runs_in,) = {stage.dtype for stage in pipeline.stages}
        assert runs_in == ((stored if good else "float32") if dtype == "auto" else dtype)
        actual = logits_beside_a_stranger(pipeline)
        if off is not None:
            assert float((actual.float() - expected).abs().mean() / expected.abs().mean()) < off, dtype
        pipeline.open(1)
        assert torch.equal(pipeline.logits((1, 0, TOKENS))[0], actual), dtype
    with pytest.raises(ModelError, match="device cpu can't compute in float16"):
        Cutter().cut(folder, (0, 2, 6), "float16")


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("mixtral", "float32")])
def test_kernels_are_named(kind: str, dtype: str, folders: Any) -> None:
    """What is prepared says which kernels it has, in which dtype, and that they are exact."""
    executor = TorchExecutor(str(folders(kind)), dtype=dtype, memory_limit=1 << 30)
    kernels = executor.prepare(LayerRange(0, 2), (), 8, nothing).kernels
    inputs = (96, 136)
    assert choose_kernel(torch.device("cpu"), getattr(torch, dtype), inputs).name in kernels
    assert kernels.endswith(f"{dtype}, exact")
    assert ("experts" in kernels) == (kind == "mixtral")
    assert ("attention native" in kernels) == (native.library() is not None)
    assert ("native, by group" in kernels) == (kind == "mixtral" and native.library() is not None)
    assert "inexact" not in kernels


def test_models_that_apply_curves_by_themselves_are_named_exact() -> None:
    """Qwen2-MoE weighs its shared expert by a sigmoid of one number per row, which is aligned (``test_kernels``)."""
    for kind in ("qwen2_moe", "qwen3_moe"):
        skeleton = ModelSkeleton(named_config(kind), torch.device("cpu"), torch.float32)
        assert describe_kernels(skeleton, (), ()).endswith(", exact")
