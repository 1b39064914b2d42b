"""Streaming: sampled tokens one by one, reproducible by seed, with the compute time of each stage.

python examples/stream.py ["a prompt"]
"""

import sys
from collections import defaultdict

from _swarm import running_swarm

from swarm import Client, SamplingParams

prompt = sys.argv[1] if len(sys.argv) > 1 else "One day"
params = SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95)

with running_swarm() as url, Client(url) as client:
    for seed in (1, 2, 1):
        print(f"\n== seed {seed}\n{prompt}", end="")
        compute_s: dict[str, float] = defaultdict(float)
        stream = client.stream(prompt, params, seed=seed, hops=True)
        for piece in stream:
            print(piece.text, end="", flush=True)
            for hop in piece.hops:  # one per stage
                compute_s[f"{hop.worker} (layers {hop.layers.first}-{hop.layers.stop - 1})"] += hop.compute_s
        print()
        for stage, seconds in compute_s.items():
            print(f"   {stage} computed {1000 * seconds:.1f} ms")

    print(f"\n== leaving the loop cancels the request\n{prompt}", end="")
    for piece in client.stream(prompt, params, seed=1):
        if "." in piece.text:
            break
        print(piece.text, end="", flush=True)
    print(" …")
