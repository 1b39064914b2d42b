"""Speculation: tokens of running answers that are guessed, and verified in the same step in which they are computed.

A proposer guesses how a sequence goes on. The scheduler appends the guess to the sequence's next row. Every stage
computes these positions like any others. The last stage draws a token after each of them, in order, and stops at the
first draw that differs from the guess. A draw depends on the logits, the seed and the position only, and a row's bits
do not depend on its batch, so the answer has the same tokens and log probabilities with and without guesses.

Refused positions are removed from the stages by the next step's header. Until then a stage treats its proposed tokens
as unverified: it copies none of them to other workers, to disk or into its inventory.
"""
