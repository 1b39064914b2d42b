#!/usr/bin/env python3
"""Time the drawing of a token: our kernel beside the usual way (a whole sort in float64), in turns, in one process."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from bench_lib import processor, timed_in_turns, wait_passively

from swarm.params import SamplingParams
from swarm.stage import native
from swarm.stage.engine.native_sampling import sample_rows_native
from swarm.stage.engine.sampling import uniform_draw
from swarm.stage.executor import SampleJob

WORDS = (32_000, 151_936, 262_144)
ROWS = (1, 16)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_p .95": {"temperature": 0.7, "top_p": 0.95},
    "top_k 50": {"temperature": 0.7, "top_k": 50},
    "min_p .05": {"temperature": 0.7, "min_p": 0.05},
    "logprobs 5": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "everything": {
        "temperature": 0.7,
        "top_k": 1000,
        "top_p": 0.95,
        "min_p": 0.01,
        "logprobs": 5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 1.0},
    },
}
HISTORY = 2000


def usual(row: np.ndarray[Any, Any], job: SampleJob) -> int:
    """Draw a token by sorting, as libraries do it."""
    params, scores = job.params, row.astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    _penalise(scores, job)
    if params.logprobs is not None:
        _logs(row.astype(np.float64), params.logprobs)
    if params.greedy:
        return int(scores.argmax())
    weights = np.exp((scores - scores.max()) / params.temperature)
    if params.top_k:
        weights[weights < np.partition(weights, -params.top_k)[-params.top_k]] = 0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p * weights.sum()]] = 0
    if params.min_p:
        weights[weights < params.min_p] = 0
    summed = np.cumsum(weights)
    return int(np.searchsorted(summed, uniform_draw(job.seed, len(job.history)) * summed[-1], side="right"))


def _penalise(scores: np.ndarray[Any, Any], job: SampleJob) -> None:
    params = job.params
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(job.history))
        found = scores[seen]
        scores[seen] = np.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
        said, counts = np.unique(np.asarray(job.history[job.num_prompt :]), return_counts=True)
        scores[said] -= params.presence_penalty + params.frequency_penalty * counts


def _logs(scores: np.ndarray[Any, Any], count: int) -> list[float]:
    logs = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
    best = np.argpartition(logs, -count)[-count:]
    return [float(logs[each]) for each in best[np.argsort(-logs[best])]]


def usual_step(logits: torch.Tensor, jobs: Sequence[SampleJob]) -> list[int]:
    """Draw a step's tokens in the usual way; greedy ones by torch alone."""
    scores = logits.float()
    if not torch.isfinite(scores).all():
        raise SystemExit("the logits are not finite")
    largest = torch.argmax(scores, -1).tolist()
    if jobs[0].params == SamplingParams():
        return list(largest)
    return [usual(row, job) for row, job in zip(scores.numpy(), jobs, strict=True)]


def logits_like(shape: str, rows: int, words: int, dtype: torch.dtype) -> torch.Tensor:
    """Make logits. ``model``: few tokens have almost all the weight, as after a prompt; ``flat``: thousands do."""
    chance = np.random.default_rng(words + rows)
    scores = chance.normal(size=(rows, words)) * 2 if shape == "flat" else chance.gumbel(size=(rows, words)) * 1.5
    return torch.from_numpy(scores.astype(np.float32)).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, nargs="*", default=WORDS)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--shape", choices=("model", "flat"), default="model")
    arguments = parser.parse_args()
    wait_passively()
    if native.library() is None:
        parser.error(native.unavailable_reason())
    torch.set_num_threads(arguments.threads)
    print(f"{processor()}, {arguments.threads} threads, variant {native.variant()}: {shlex.join(sys.argv)}")
    print(f"{'words':>8} {'rows':>4}  {'':12} {'ms a token':>10} {'by sorting':>10} {'ratio':>6}")
    for words in arguments.words:
        for rows in arguments.rows:
            _compare(logits_like(arguments.shape, rows, words, getattr(torch, arguments.dtype)), arguments)


def _compare(logits: torch.Tensor, arguments: argparse.Namespace) -> None:
    rows, words = logits.shape
    history = [int(each) for each in np.random.default_rng(1).integers(words, size=HISTORY)]
    for name, fields in CASES.items():
        jobs = [SampleJob(row, SamplingParams(**fields), row, history, HISTORY // 2) for row in range(rows)]
        ways = {
            "ours": lambda jobs=jobs: sample_rows_native(logits, jobs, (2,), arguments.threads),
            "theirs": lambda jobs=jobs: usual_step(logits, jobs),
        }
        found = timed_in_turns(ways, arguments.rounds)
        ours, theirs = (min(found[who]) / rows * 1e3 for who in ways)
        print(f"{words:8} {rows:4}  {name:12} {ours:10.3f} {theirs:10.3f} {theirs / ours:6.1f}", flush=True)


if __name__ == "__main__":
    main()
