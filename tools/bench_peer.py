#!/usr/bin/env python3
"""A peer of bench_decode.py: ``transformers`` with a whole model, as anybody would use it. Answers bench_questions.py.

    bench_peer.py MODEL THREADS

Same dtype as the files, attention as transformers chooses it, greedy, prompts padded on the left, its own KV cache.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch
from bench_questions import Contestant, answer_questions
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

GIB = 1 << 30


class Transformers(Contestant):
    """The model, and the keys and values of prompts that were prepared."""

    def __init__(self, path: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        self.prepared: tuple[torch.Tensor, DynamicCache] | None = None

    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        began = perf_counter()
        done = self._generate(ids, mask, new)
        return perf_counter() - began, done[:, longest:].tolist()

    def prepare(self, shared: list[int], tails: list[list[int]]) -> float:
        """Compute the prompts ``shared + tail`` up to their last token, the shared part once."""
        began = perf_counter()
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([shared]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(tails))
        ids = torch.tensor(tails)
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.prepared = torch.cat((torch.tensor([shared] * len(tails)), ids), dim=1), cache
        return perf_counter() - began

    def go_on(self, new: int) -> float:
        assert self.prepared is not None
        ids, cache = self.prepared
        surplus = cache.get_seq_length() - (ids.shape[1] - 1)  # the last token is computed again, for its logits
        cache.crop(-surplus)
        began = perf_counter()
        self._generate(ids, torch.ones_like(ids), new, past_key_values=cache)
        return perf_counter() - began

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, new: int, **more: object) -> torch.Tensor:
        done = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            use_cache=True,
            **more,
        )
        assert done.shape[1] == ids.shape[1] + new
        return done

    def bandwidth(self) -> float:
        """Measure the bytes per second that all threads together read: the best of several kernels and rounds."""
        block = torch.ones(GIB // 4, dtype=torch.float32)
        vector = torch.ones(4096)
        matrix = block.view(-1, 4096)
        kernels = (block.sum, block.max, lambda: torch.mv(matrix, vector), block.view(torch.int32).max)
        best = 0.0
        for _ in range(5):
            for kernel in kernels:
                began = perf_counter()
                kernel()
                best = max(best, GIB / (perf_counter() - began))
        return best


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        answer_questions(Transformers(path))


if __name__ == "__main__":
    main()
