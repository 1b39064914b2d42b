"""The draft model: a small model in a child process of the broker's that proposes tokens of running answers.

Requests for proposals come in, with the tokens that each sequence has gained, and proposals go out
(``wire.draft_messages``). The process decides which sequences it keeps in its memory and in which order it computes.
It draws with the same function, parameters, seed and positions as the last stage, so that sampled answers agree as
often as the two models do. It has no network, and a proposal can't change an answer: the stages verify it.
"""
