"""Whether a model from files is served as transformers computes it: logits, greedy tokens, and bits that depend neither
on the cut nor on the crowd, nor on what was lost or taken over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.params import SamplingParams
from swarm.stage.engine import selfcheck
from swarm.stage.engine.tiny import VOCABULARY
from swarm.stage.executor import Batch
from swarm.stage.model.configuration import fix_rope
from swarm.stage.model.decoders import count_layers
from swarm.wire.messages import Row
from tests.model.cutting import LIMIT, Cutter, Pipeline, never, nothing, random_tokens
from tests.model.models import load_whole

PROMPT = 40
# Where the scores of a router or an index nearly tie, two right computations choose other experts or positions, so the
# logits of one prompt may differ. Those of three prompts differ by no such accident. Of other models, each may not.
SEEDS = (3, 4, 5)
_CHOICES = {"router", "experts", "indexer"}  # names of modules that choose by scores, or are chosen
DTYPES = ("float32", "bfloat16")
# How much further than transformers' own logits ours may be, where rounding moves both by much: which of them is nearer
# is chance.
_CHANCE_FACTOR = 1.25
CHANCE = "the greedy tokens are chance"  # of transformers' model alone: its two best scores are equal too often
TOKENS, STRANGER = (random_tokens(142, seed=seed, vocabulary=251) for seed in (5, 1))
_REPETITION = 1.5  # small random models soon repeat themselves otherwise
_PARAMS = SamplingParams(ignore_eos=True, repetition_penalty=_REPETITION)


def check_as_transformers(folder: Path, num_new: int, most_stages: int) -> None:
    """Compare with transformers in float32 and bfloat16, cut into up to ``most_stages``."""
    whole, cutter = load_served(folder), Cutter()
    num_layers = count_layers(whole.config.get_text_config())
    assert num_layers >= most_stages
    lines = [even_lines(num_layers, num) for num in range(1, most_stages + 1)]
    reasons: list[str] = []
    for seed in SEEDS:
        tokens = greedy(whole, random_tokens(PROMPT, seed=seed, vocabulary=VOCABULARY), num_new)
        with torch.inference_mode():
            expected = whole(torch.tensor([tokens]), use_cache=False).logits[0]
        made = {dtype: [logits(cutter.cut(folder, cut, dtype), tokens) for cut in lines] for dtype in DTYPES}
        for dtype, results in made.items():
            assert all(torch.equal(results[0], other) for other in results[1:]), dtype
            check_recoveries(cutter.cut(folder, lines[-1], dtype), tokens, results[0])
        compute = partial(logits_in, folder, tokens)
        reasons = [reason for dtype in DTYPES if (reason := difference(made[dtype][0], expected, dtype, compute))]
        if reasons == [] or not (chooses_by_scores(whole) or reasons == [CHANCE]):
            break
    assert reasons == [], reasons


def chooses_by_scores(whole: Any) -> bool:
    """Whether a model has a router or an index, so that rounding may change what a token sees."""
    return any(_CHOICES & set(name.split(".")) for name, _ in whole.named_modules())


def logits_beside_a_stranger(pipeline: Pipeline) -> torch.Tensor:
    """Chunks, then single tokens, each beside a stranger's next one."""
    pipeline.open(1, 2)
    bounds = [0, 33, 75, 130, *range(131, len(TOKENS) + 1)]
    pieces = [
        pipeline.logits((2, n, STRANGER[n : n + 1]), (1, start, TOKENS[start:stop]))[1]
        for n, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    return torch.cat(pieces)


def check_greedy(whole: Any, pipeline: Pipeline, num_new: int) -> list[int]:
    """Check that greedy tokens are those of the whole model's ``generate``, as far as these are well-defined: up to the
    first where the two best scores are nearer to each other than the two computations need to be. Return them. A prompt
    for which that comes too early is replaced by another."""
    made, num_clear = generated(whole, TOKENS[:60], num_new)
    if num_clear <= num_new // 2:
        made, num_clear = generated(whole, STRANGER[:60], num_new)
    pipeline.open(1)
    history, start = made[:60], 0
    for _ in range(num_clear):
        token = pipeline.sample(1, history, start, _PARAMS, seed=0).token
        start = len(history)
        history.append(token)
    assert history == made[: len(history)]
    assert num_clear > num_new // 2
    return history[60:]


def generated(whole: Any, tokens: list[int], num_new: int) -> tuple[list[int], int]:
    """Return a prompt and the model's greedy answer, and how many of its first tokens are well-defined."""
    prompt = torch.tensor([tokens])
    made = whole.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        repetition_penalty=_REPETITION,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(made.scores)[:, 0].topk(2).values
    clear = (best[:, 0] - best[:, 1] > 1e-4 * best[:, 0].abs()).int().cumprod(0).sum()
    return made.sequences[0].tolist(), int(clear)


def load_served(folder: Path) -> Any:
    """Load transformers' whole model; of two sets of ``longrope`` factors, it gets the one that Swarm takes for all
    lengths."""
    config = AutoConfig.from_pretrained(folder)
    if "longrope" not in str(getattr(config, "rope_parameters", None)):
        return load_whole(folder)
    attention = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, config=fix_rope(config), **attention).eval()


def even_lines(num_layers: int, num_stages: int) -> tuple[int, ...]:
    return tuple(num * num_layers // num_stages for num in range(num_stages + 1))


def greedy(whole: object, tokens: list[int], num_new: int) -> list[int]:
    for _ in range(num_new):
        with torch.inference_mode():
            tokens = [*tokens, int(whole(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())]  # type: ignore[operator]
    return tokens


def logits_in(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the logits of transformers' model in this dtype."""
    config = fix_rope(AutoConfig.from_pretrained(folder))
    how = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    whole = AutoModelForCausalLM.from_pretrained(folder, config=config, **how).eval()
    with torch.inference_mode():
        found: torch.Tensor = whole(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


def off_by(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the positions' differences, relative to the largest number."""
    return (logits.float() - expected).abs().amax(-1) / expected.abs().max()


def difference(
    logits: torch.Tensor, expected: torch.Tensor, dtype: str, compute: Callable[[torch.dtype], torch.Tensor]
) -> str:
    """How the logits of a greedy answer differ by more than rounding. Where rounding moves much, it moves transformers'
    own logits as far (``compute`` returns them in another dtype): in float32 from those in float64, in bfloat16 from
    those in float32, there in the median of the positions."""
    worst = float(off_by(logits, expected).max() if dtype == "float32" else off_by(logits, expected).median())
    if not worst < selfcheck.allowed_difference(dtype):
        if dtype == "float32":
            exact = compute(torch.float64)
            is_right = off_by(logits, exact).max() < _CHANCE_FACTOR * off_by(expected, exact).max()
        else:
            is_right = worst < _CHANCE_FACTOR * off_by(compute(torch.bfloat16), expected).median()
        if not is_right:
            return f"{dtype}: off by {worst:.1e}"
    if dtype == "float32":
        best = expected[PROMPT - 1 :].topk(2).values
        clear = (best[:, 0] - best[:, 1]) / expected.abs().max() > selfcheck.TOLERANCE
        if not clear.sum() > len(clear) // 2:
            return CHANCE
        if not torch.equal(logits[PROMPT - 1 :].argmax(-1)[clear], expected[PROMPT - 1 :].argmax(-1)[clear]):
            return "other greedy tokens"
    return ""


def logits(pipeline: Pipeline, tokens: list[int]) -> torch.Tensor:
    """Of a prompt in chunks and then single tokens, beside sequences whose rows come and go."""
    pipeline.open(1, 2, 3)
    pieces, start = [], 0
    for number, count in enumerate((17, 16, PROMPT - 33, *[1] * (len(tokens) - PROMPT))):
        mine, other = (1, start, tokens[start : start + count]), (2, number, tokens[number : number + 1])
        parts = [other, mine] if number % 3 else [mine, other, (3, number, tokens[number : number + 3])]
        pieces.append(pipeline.logits(*parts)[parts.index(mine)])
        start += count
    return torch.cat(pieces)


def check_recoveries(pipeline: Pipeline, tokens: list[int], expected: torch.Tensor) -> None:
    """A stage is lost and computes its logged inputs again; another sequence begins with this one's prefix. Layers with
    states keep one at each position, since these texts are shorter than the usual stride."""
    for each in pipeline.stages:
        each.reset()
        each._arena.states._stride = 1
    pipeline.open(1)
    inputs = run(pipeline, 1, 0, tokens)[1]
    at, lost = PROMPT + 3, len(pipeline.stages) // 2
    stage = pipeline.stages[lost]
    pipeline.truncate(1, at)
    stage.release(1)
    stage.open(1, LIMIT)
    again = inputs[lost]
    row, ids = (Row(1, 0, at, False),), np.asarray(tokens[:at], np.int64)
    stage.forward(Batch(row, ids, None if again is None else again[:at], ()), never, nothing)
    assert is_same(pipeline, run(pipeline, 1, at, tokens[at:])[0], expected[at:]), "after a replay"
    for each in pipeline.stages:
        each.fork(4, 1, 32, LIMIT)
    assert is_same(pipeline, run(pipeline, 4, 32, tokens[32:])[0], expected[32:]), "after a fork"


def is_same(pipeline: Pipeline, logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the bits are the same; of stages that call themselves inexact, the numbers."""
    kernels = [stage._kernels.describe(stage._active_stage().modules)[0] for stage in pipeline.stages]
    if not any("inexact" in each for each in kernels):
        return torch.equal(logits, expected)
    off = (logits.float() - expected.float()).abs().amax(-1) / float(expected.abs().max())
    return float(off.median()) < selfcheck.TOLERANCE


def run(
    pipeline: Pipeline, sequence: int, start: int, tokens: Sequence[int]
) -> tuple[torch.Tensor, list[np.ndarray | None]]:
    """Return the logits, and each stage's input."""
    rows, ids = (Row(sequence, start, len(tokens), False),), np.asarray(tokens, np.int64)
    inputs: list[np.ndarray | None] = [None]
    for stage in pipeline.stages[:-1]:
        inputs.append(stage.forward(Batch(rows, ids, inputs[-1], ()), never, nothing).hidden)
    return pipeline.stages[-1].logits(Batch(rows, ids, inputs[-1], ())), inputs
