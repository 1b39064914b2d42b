"""Steps: who joins the next one, and who has room for keys and values.

Comes in: sequences that wait (``state.queue``) or run, and answers of the last stage. Goes out: steps to be sent, and
positions that are acknowledged; the tokens that came with an answer go to ``requests``. Rules: decodes and prompts are
governed apart, so that neither starves the other; nothing is dispatched without room for it; an answer counts once, and
only for the stay in which its sequence was sent.

``scheduler`` forms a batch of sequences that need a token and prompts that want in, admits those who wait, and says
what counts of a step that has come back. ``room`` says who gives way when there is not enough: whoever has the least
claim, and nobody loses a token by it. ``apart``: who is computed alone after a step has raised.
"""
