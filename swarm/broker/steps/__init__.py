"""Steps: which sequences join the next one, and which hold KV blocks in the stages.

In: waiting sequences (``state.queue``), running sequences, and answers of the last stage. Out: steps to send, and
acknowledged positions; the tokens of an answer go to ``requests``. Rules: decodes and prompts are limited separately,
so that neither starves the other; nothing is dispatched without KV blocks for it; an answer counts once, and only for
the residency in which its sequence was sent.

- ``scheduler`` forms a batch of sequences that need a token and prompts that are not computed yet, admits waiting
  sequences, computes suspects alone after a step has raised, and decides what counts of a completed step
- ``images`` decides which parts of the vision tower's work a step has
- ``kv_capacity`` decides which sequence is preempted when blocks are short; no token is lost by it
"""
