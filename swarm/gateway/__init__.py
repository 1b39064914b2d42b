"""The HTTP gateway: any OpenAI or Anthropic client talks to the swarm. Stateless: all that lasts is the broker's.

A body comes in at a route of ``app``. Its API (``apis``) checks it and makes an :class:`~swarm.gateway.ask.Ask` of it,
which no longer knows where it came from. The desk (``desk``) makes a prompt of it (chat template, tokenizer; beside the
loop where that takes time), hands it to the client, and makes :mod:`parts <swarm.gateway.answer>` of what comes: text,
tool calls (``tools`` finds them in the text), ends. The API writes parts in its own words, whole or streamed (``sse``).

Rules. Everything that decides is pure: bodies to asks, text to parts, parts to JSON. The parts of an answer depend on
its tokens alone, not on when they came, so a stream can go on from any gateway: it is made again and what was
sent is left out. What would change an answer and isn't supported is refused by name.
"""
