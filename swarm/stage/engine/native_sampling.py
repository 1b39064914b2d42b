"""Sampling of tokens by our own kernel, which computes the rule in ``sampling``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.stage import native
from swarm.stage.engine.sampling import MAX_VOCABULARY, SampledToken, forbidden_tokens, is_greedy, num_listed
from swarm.wire.messages import TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.stage.engine.sampling import Mask
    from swarm.stage.executor import SampleJob

_pointer, _count, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class NativeDraw(ctypes.Structure):
    """Arguments and result of one draw: ``SwarmDraw`` of kernels.h."""

    _fields_ = [
        ("logits", _pointer),
        ("history", _pointer),
        ("biased", _pointer),
        ("biases", _pointer),
        ("forbidden", _pointer),
        ("allowed", _pointer),
        ("num_history", _count),
        ("num_prompt", _count),
        ("num_biased", _count),
        ("num_forbidden", _count),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("greedy", _count),
        ("top_k", _count),
        ("temperature", _number),
        ("top_p", _number),
        ("min_p", _number),
        ("repetition", _number),
        ("presence", _number),
        ("frequency", _number),
        ("num_best", _count),
        ("ids", _pointer),
        ("logs", _pointer),
        ("token", _count),
    ]


def supports(logits: torch.Tensor) -> bool:
    """Whether the kernel can read these rows."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in native.KINDS
        and logits.stride(-1) == 1
        and logits.shape[-1] <= MAX_VOCABULARY
        and native.library() is not None
    )


def sample_rows_native(
    logits: torch.Tensor,
    jobs: Sequence[SampleJob],
    eos_token_ids: Sequence[int],
    threads: int,
    masks: Sequence[Mask | None] = (),
) -> list[SampledToken | None]:
    """Draw the token after each job's history, from the row with the job's index. None where a logit is not a finite
    number.

    ``masks`` holds the tokens that are allowed in each row; without it, all tokens are allowed.
    """
    library = native.library()
    assert library is not None, "the caller has checked supports()"
    words = logits.shape[-1]
    width = logits.stride(0) * logits.element_size()
    draws = (NativeDraw * len(jobs))()
    arrays = [
        _fill_draw(draw, logits.data_ptr() + row * width, job, words, eos_token_ids, mask=masks[row] if masks else None)
        for row, (draw, job) in enumerate(zip(draws, jobs, strict=True))
    ]
    native.check_status(library.swarm_draw(native.KINDS[logits.dtype], words, draws, len(jobs), threads))
    return [None if draw.token < 0 else _read_result(draw, held) for draw, held in zip(draws, arrays, strict=True)]


class _DrawArrays:
    """Owner of the arrays that a draw points to: it must live as long as the draw."""

    def __init__(self, draw: NativeDraw) -> None:
        self._draw, self._arrays = draw, list[object]()
        self.ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.logs: NDArray[np.float64] = np.empty(0)

    def set_array(self, name: str, number: str, array: NDArray[np.generic]) -> None:
        """Store an array, and put its address and length into these fields of the draw."""
        self._arrays.append(array)
        setattr(self._draw, name, array.ctypes.data)
        setattr(self._draw, number, len(array))

    def set_mask(self, mask: Mask) -> None:
        self._arrays.append(mask)
        self._draw.allowed = mask.ctypes.data

    def allocate_logprobs(self, count: int) -> None:
        self.ids, self.logs = np.empty(1 + count, np.int64), np.empty(1 + count)
        self._draw.ids, self._draw.logs = self.ids.ctypes.data, self.logs.ctypes.data


def _fill_draw(
    draw: NativeDraw, address: int, job: SampleJob, words: int, eos_token_ids: Sequence[int], *, mask: Mask | None
) -> _DrawArrays:
    params, held = job.params, _DrawArrays(draw)
    draw.logits, draw.greedy = address, is_greedy(params)
    draw.seed, draw.position = job.seed, len(job.history)
    draw.temperature, draw.top_k, draw.top_p, draw.min_p = params.temperature, params.top_k, params.top_p, params.min_p
    draw.repetition, draw.presence, draw.frequency = (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    if params.logit_bias:
        held.set_array("biased", "num_biased", np.fromiter(params.logit_bias.keys(), np.int64))
        held.set_array("biases", "num_biased", np.fromiter(params.logit_bias.values(), np.float64))
    if params.repetition_penalty != 1.0:
        held.set_array("history", "num_history", np.asarray(job.history, np.int64))
        draw.num_prompt = job.num_prompt
    elif params.presence_penalty or params.frequency_penalty:
        held.set_array("history", "num_history", np.asarray(job.history[job.num_prompt :], np.int64))
    forbidden = forbidden_tokens(params, len(job.history) - job.num_prompt, eos_token_ids)
    if mask is not None:
        held.set_mask(mask)
    elif forbidden:
        held.set_array("forbidden", "num_forbidden", np.asarray(forbidden, np.int64))
    draw.num_best = num_listed(params, words)
    if draw.num_best >= 0:
        held.allocate_logprobs(draw.num_best)
    return held


def _read_result(draw: NativeDraw, held: _DrawArrays) -> SampledToken:
    logs = zip(held.ids.tolist(), held.logs.tolist(), strict=True)
    return SampledToken(draw.token, tuple(TokenLogprob(token_id, log) for token_id, log in logs))
