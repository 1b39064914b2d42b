#!/usr/bin/env python3
"""Compute llama.cpp's logits of a GGUF file after every token: bench_llama_logits.py FILE PROMPTS.json LOGITS.npy

Runs with an interpreter that has llama_cpp. Keys and values are in float32: what is left is the rounding of its
products. Each prompt is one batch of exactly its length.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import numpy as np
from bench_llama import Context, Llama, api, remember


def main(file: str, prompts_file: str, out: str) -> None:
    api.llama_log_set(remember, ctypes.c_void_p(0))
    api.llama_backend_init()
    prompts = json.loads(Path(prompts_file).read_text())
    threads = len(os.sched_getaffinity(0))
    llama = Llama(file, threads, [], wide=True)
    context = Context(llama.model, threads, True, 1, max(map(len, prompts)))
    logits = []
    for prompt in prompts:
        context.clear()
        logits.append(context.logits(prompt))
    np.save(out, np.concatenate(logits))


if __name__ == "__main__":
    main(*sys.argv[1:])
