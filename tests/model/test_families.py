"""Modules of ours in the place of a model's: recognised, right, and with bits of a row that are its own."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss_rotation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from swarm.stage import native
from swarm.stage.attention.arena import KvArena
from swarm.stage.engine import portability, selfcheck
from swarm.stage.engine.forward import run_batch
from swarm.stage.executor import Batch
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.modules.experts import NativeMixture, replace_experts, replace_mixture
from swarm.stage.modules.mlps import NativeActivation
from swarm.stage.modules.norms import replace_norm
from swarm.stage.modules.reading import RowKind, WeightReader
from swarm.stage.modules.recognition import find_activation, same_function
from swarm.stage.native import cores
from swarm.stage.native.linears import FUNCTIONS, NativeLinear, NativeModule
from swarm.wire.messages import LayerRange, Row
from tests.model.models import ARCHITECTURES, named_config

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
PORTABLE = ("avx512", "avx2", "neon", "portable")  # those that sum in one order, by one kind of instruction
COUNTS = (1, 2, 3, 7, 17, 40)
MOST = 70


def here() -> list[str]:
    library = native.library()
    return [] if library is None else native.variants(library)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held_by(part: nn.Module) -> WeightReader:
    """Reads a part's own weights."""
    dtype = next((each.dtype for each in part.parameters()), torch.float32)
    return WeightReader(lambda name, _: part.get_parameter(name).data.clone(), RowKind(dtype))


def in_every_variant(module: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """What the module makes of the rows: in every variant each row has the bits that it has alone, for one thread and
    for two, and those that sum in one order agree about all of them. Returns what the first one made."""
    made = {}
    for name in here():
        with native.using_variant(name), torch.inference_mode():
            with cores.computing(2, len(rows)):
                made[name] = module(rows)
            for count in COUNTS:
                first = count * 7 % (len(rows) - count + 1)
                with cores.computing(1, count):
                    assert torch.equal(module(rows[first : first + count].clone()), made[name][first : first + count])
    agreed = [made[name] for name in PORTABLE if name in made]
    assert all(torch.equal(each, agreed[0]) for each in agreed)
    return made[here()[0]]


def near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    off = float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())
    return off < {torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]


# --- whole families ---------------------------------------------------------------------------------------------------


def stage_of(config: Any, dtype: torch.dtype) -> Stage:
    skeleton = ModelSkeleton(config, CPU, dtype)
    state = selfcheck._random_model(config).state_dict()
    weights = WeightLoader(skeleton, selfcheck.MemorySource(state), lambda _: None)
    return Stage(skeleton, LayerRange(0, skeleton.num_layers), {}, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_nothing_of_a_known_layer_is_left_to_torch(kind: str, dtype: torch.dtype) -> None:
    """Every matrix, norm, activation and attention of a named kind's layers is ours, and torch is left
    with what every processor rounds alike: no product, no sum, no exponential."""
    stage = stage_of(named_config(kind), dtype)
    for name, module in stage.modules.items():
        for path, leaf in module.named_modules(prefix=name):
            if not list(leaf.children()) and not isinstance(leaf, NativeModule):
                assert isinstance(leaf, nn.Embedding | nn.ModuleList), path
    arena = KvArena(CPU)
    arena.open(1, 64)
    for start, count in ((0, 9), (9, 1)):  # the first one makes the tables of positions
        rows = (Row(1, start, count, True),)
        arena.mark_used(rows[0])
        with portability.watch_operations() as found:
            run_batch(stage, arena, Batch(rows, torch.arange(3, 3 + count).numpy(), None, ()))
    assert found == set()


@pytest.mark.parametrize("inner", ["rotate_half", "_apply_rotary_emb"])
def test_what_reads_alike_and_calls_another_is_not_taken(inner: str) -> None:
    """Control: a rotation of the same code around another function of that name is another one."""
    known = llama_rotation if inner == "rotate_half" else gpt_oss_rotation
    bare = inspect.unwrap(known)
    assert inner in bare.__code__.co_names
    same = FunctionType(bare.__code__, dict(bare.__globals__))
    other = FunctionType(bare.__code__, bare.__globals__ | {inner: lambda x, *_: x})
    assert same_function(same, known)
    assert not same_function(other, known)


def test_a_family_that_rotates_otherwise_keeps_its_attention() -> None:
    """GLM's reads like Llama's. Its products are ours all the same."""
    config = AutoConfig.for_model("glm", num_hidden_layers=2, pad_token_id=0, hidden_size=64, head_dim=16)
    layer = stage_of(config, torch.float32).modules["model.layers.0"]
    kinds = {name: type(part).__name__ for name, part in layer.named_modules()}
    assert kinds["self_attn"] == "GlmAttention"
    assert kinds["self_attn.o_proj"] == "NativeLinear"


# --- experts ----------------------------------------------------------------------------------------------------------

MIXTURES = {"mixtral": MixtralSparseMoeBlock, "qwen3_moe": Qwen3MoeSparseMoeBlock, "gpt_oss": GptOssMLP}
HIDDEN, INNER, EXPERTS = 72, 40, 7


def block(kind: str, choices: int = 3, **changes: Any) -> Any:
    """transformers' own, with weights; sizes that fill no block."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER}
    number = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": choices}
    config = AutoConfig.for_model(kind, **(sizes | number | changes))
    config._experts_implementation = "eager"
    made = MIXTURES[kind](config).eval().requires_grad_(False)
    for index, parameter in enumerate(made.parameters()):
        parameter.data = random(*parameter.shape, seed=index) * 0.3
    return made


def ours(part: Any, dtype: torch.dtype = torch.float32) -> NativeMixture:
    mixture = replace_mixture(part, held_by(part.to(dtype)))
    assert isinstance(mixture, NativeMixture)
    return mixture


def answer(part: Any, rows: torch.Tensor) -> torch.Tensor:
    result = part(rows.unsqueeze(0))
    return (result[0] if isinstance(result, tuple) else result)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mixtral", {}), ("qwen3_moe", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("gpt_oss", {})],
    ids=["mixtral", "qwen3_moe", "qwen3_moe normed", "gpt_oss"],
)
def test_mixtures(kind: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Router, choice, experts and sum come to what transformers makes of the same weights."""
    part, rows = block(kind, **changes), random(MOST, HIDDEN, seed=9, dtype=dtype)
    expected = answer(copy.deepcopy(part).to(dtype).float(), rows.float())
    actual = in_every_variant(lambda some: answer(mixture, some), rows) if (mixture := ours(part, dtype)) else rows
    if dtype == torch.float32:
        assert near(actual, expected, dtype)
    else:  # a row may go to other experts for a rounded logit
        off = (actual.float() - expected).abs().amax(-1) / expected.abs().max()
        assert float(off.median()) < 2e-2


def test_many_rows_of_one_expert_and_none_of_others() -> None:
    """All rows may choose the same experts: panels, and groups without a row."""
    part = block("qwen3_moe", choices=1)
    part.gate.weight.data.zero_()
    part.gate.weight.data[4] = 1.0
    rows = random(600, HIDDEN, seed=2).abs()
    assert near(answer(ours(part), rows), answer(part, rows), torch.float32)


def test_the_lowest_number_among_equals() -> None:
    """Where logits are equal the experts with the lowest numbers are chosen, whatever number of them there is."""
    for kind in MIXTURES:
        part = block(kind)
        router = getattr(part, "gate", None) or part.router
        router.weight.data.zero_()
        if hasattr(router, "bias"):
            router.bias.data.zero_()
        kept = copy.deepcopy(part)
        for name, parameter in kept.experts.named_parameters():
            assert parameter.shape[0] == EXPERTS, name
            parameter.data[3:] = float("nan")  # of those that must not be asked
        rows = random(5, HIDDEN, seed=3)
        assert torch.equal(answer(ours(kept), rows), answer(ours(part), rows))


def test_logits_that_are_no_numbers() -> None:
    """A row of no numbers makes no numbers, and its neighbours have the bits that they have without it."""
    mixture, rows = ours(block("mixtral")), random(9, HIDDEN, seed=4)
    expected = answer(mixture, rows)
    rows[5] = float("nan")
    actual = answer(mixture, rows)
    assert actual[5].isnan().all()
    assert torch.equal(actual[[0, 1, 2, 3, 4, 6, 7, 8]], expected[[0, 1, 2, 3, 4, 6, 7, 8]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_that_others_chose(kind: str, dtype: torch.dtype) -> None:
    """For a router that is not known, experts take its choice, in any order; a number that nobody has gives nothing."""
    part = block(kind).experts
    experts = replace_experts(part, held_by(part.to(dtype)))
    assert experts is not None
    rows = random(MOST, HIDDEN, seed=5, dtype=dtype)
    chosen = torch.rand(MOST, EXPERTS, generator=torch.Generator().manual_seed(6)).topk(3).indices
    weights = random(MOST, 3, seed=7).abs()

    def mixed(some: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
        at = next(i for i in range(MOST) if torch.equal(rows[i : i + len(some)], some))
        which = slice(at, at + len(some))
        order = torch.arange(3) if order is None else order
        return experts(some, chosen[which][:, order], weights[which][:, order])  # type: ignore[no-any-return]

    made = in_every_variant(mixed, rows)
    assert torch.equal(mixed(rows, torch.tensor([2, 0, 1])), mixed(rows))
    assert near(made, part.float()(rows.float(), chosen, weights), dtype)
    two, nobody = experts(rows, chosen[:, :2], weights[:, :2]), chosen.clone()
    nobody[:, 2] = EXPERTS
    assert torch.equal(experts(rows, nobody, weights), two)


def test_a_layers_experts_exist_once() -> None:
    """While experts are loaded, no more than one of their tensors is there beside what is packed."""
    part, alive = block("mixtral").experts, []

    def read(name: str, _: torch.Tensor) -> torch.Tensor:
        assert [each for each in alive if each() is not None] == [], name
        tensor = part.get_parameter(name).data.clone()
        alive.append(weakref.ref(tensor))
        return tensor

    assert replace_experts(part, WeightReader(read, RowKind(torch.float32))) is not None
    assert len(alive) == 2


@pytest.mark.parametrize("off", ["has_post_expert_norm", "_apply_gate", "act_fn"])
def test_other_experts_are_left_alone(off: str) -> None:
    """A norm after them, another gate, a function that is not known."""
    part = block("mixtral").experts
    if off == "act_fn":
        part.act_fn = nn.Softplus()
    elif off == "_apply_gate":
        part.__class__ = type("Other", (type(part),), {"_apply_gate": lambda self, rows: rows.chunk(2, -1)[0]})
    else:
        part.has_post_expert_norm = True
    assert replace_experts(part, held_by(part)) is None


# --- activations, norms -----------------------------------------------------------------------------------------------

NAMED = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_activations(name: str, dtype: torch.dtype) -> None:
    """Alone and applied to a product: the function itself, at its ends too, and no number stays none."""
    function = find_activation(ACT2FN[name])
    assert function is not None
    apply, rows = ACT2FN[name].double(), torch.cat([random(MOST - 1, 37) * 4, torch.linspace(-100, 100, 37)[None]])
    rows = rows.to(dtype)
    assert near(in_every_variant(NativeActivation(function), rows), apply(rows.double()), dtype)
    assert NativeActivation(function)(torch.full((3,), float("nan"), dtype=dtype)).isnan().all()
    weight, bias = random(67, 37, seed=2, dtype=dtype) * 0.3, random(67, seed=3, dtype=dtype)
    rows = rows / 64  # so that sums are good to as many digits as what is made of them
    product = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    assert near(in_every_variant(NativeLinear(weight, bias, function), rows), apply(product), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap(dtype: torch.dtype) -> None:
    """A head's logits within their cap."""
    weight, rows = random(67, 37, seed=2, dtype=dtype), random(MOST, 37, seed=3, dtype=dtype)
    product = torch.nn.functional.linear(rows.double(), weight.double())
    capped = in_every_variant(NativeLinear(weight, None, ("softcap", ""), 5.0), rows)
    assert near(capped, torch.tanh(product / 5.0) * 5.0, dtype)


def test_functions_have_their_own_numbers() -> None:
    """Unknown activations are left alone, and no two functions are one to the kernel."""
    assert len(set(FUNCTIONS.values())) == len(FUNCTIONS)
    assert find_activation(nn.Softplus()) is None
    assert find_activation(nn.Linear(2, 2)) is None
    assert find_activation(nn.GELU("tanh")) == ("gelu", "tanh")
    assert find_activation(nn.GELU()) == ("gelu", "none")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [17, 72, 251, 2048])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm, nn.LayerNorm])
def test_norms(kind: Any, width: int, dtype: torch.dtype) -> None:
    """Of every kind that is known, whatever the length."""
    part = kind(width).requires_grad_(False)
    for index, parameter in enumerate(part.parameters()):
        parameter.data = random(width, seed=index, dtype=dtype)
    norm = replace_norm(part, held_by(part))
    assert norm is not None
    rows = random(MOST, width, seed=8, dtype=dtype) * 3 + 1
    assert near(in_every_variant(norm, rows), part.double()(rows.double()), dtype)


def test_norms_of_other_kinds_are_left_alone() -> None:
    """One that adds 1 to a layer norm's weight, and a layer norm over two dimensions."""
    for part in (NemotronLayerNorm1P(8), nn.LayerNorm((2, 8)), nn.LayerNorm(8, elementwise_affine=False)):
        assert replace_norm(part, held_by(part)) is None
