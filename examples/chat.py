"""Chat: the model's chat template turns the conversation into a prompt; stop strings end an answer early.

python examples/chat.py ["a question" …]
"""

import sys

from _swarm import running_swarm

from swarm import Client

questions = sys.argv[1:] or ["Who are you?", "What colour is the cat?", "Where is the frog?"]

with running_swarm() as url, Client(url) as client:
    # The client sends the whole conversation each time; the swarm computes only the new part.
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        print(f"you:   {question}\nmodel: ", end="")
        stream = client.stream_chat(messages, max_tokens=60)
        for piece in stream:
            print(piece.text, end="", flush=True)
        print()
        assert stream.completion is not None  # the loop has reached the end
        messages.append({"role": "assistant", "content": stream.completion.text})

    story = [{"role": "user", "content": "Tell me a story."}]
    whole = client.chat(story, max_tokens=120)
    first = client.chat(story, max_tokens=120, stop=[".", "!"])  # the stop string itself is not part of the answer
    print(f"\na story of {len(whole.tokens)} tokens; its first sentence has {len(first.tokens)}: {first.text}.")

    text_model = client.text_model()
    assert text_model is not None  # the demo model has a tokenizer and a template
    print(f"the prompt that the template makes: {text_model.render_chat(story)!r}")
