"""Single request: one prompt, its answer, and the usage and timing of the request.

python examples/generate.py ["a prompt"]
"""

import sys

from _swarm import running_swarm

from swarm import Client

prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"

with running_swarm() as url, Client(url) as client:
    done = client.generate(prompt, max_tokens=80)  # greedy decoding; stream.py samples
    print(prompt + done.text)

    usage, timing = done.usage, done.timing
    print(f"\nended by: {done.finish_reason}; tokens: {usage.num_prompt} of prompt, {usage.num_tokens} of answer")
    print(f"first token after {1000 * timing.first_token_s:.1f} ms, all after {1000 * timing.total_s:.1f} ms")

    # A prompt may also be a list of token ids. The client sends token ids to the swarm in both cases.
    text_model = client.text_model()
    assert text_model is not None  # the demo model has a tokenizer
    again = client.generate(text_model.encode(prompt), max_tokens=80)
    print(f"the same from token ids: {'yes' if again.tokens == done.tokens else 'no'}")
