"""HTTP gateway: serves OpenAI's and Anthropic's APIs on top of the swarm. It stores batches; the broker has
all other state.

A body arrives at a route of ``app``. Its API (``apis``) checks it and turns it into an API-independent
:class:`~swarm.gateway.completion_request.CompletionRequest`. The completion service (``completion``) makes the prompt
(chat template and tokenizer, in threads where that takes time), submits it through the client library, and turns the
resulting tokens into :mod:`parts <swarm.gateway.answer>`: text, tool calls (which ``tool_calls`` finds in the text) and
ends. The API encodes parts in its own format, as one response or as a stream (``sse``).

Rules. Everything that decides is pure: bodies to requests, text to parts, parts to JSON. The parts of an answer depend
only on its tokens, not on their timing, so any gateway can resume a stream: it generates the events again and leaves
out those already sent. A field that would change an answer and is not supported is rejected by name.
"""
