"""Reasoning formats of models: how a model marks the thinking that precedes its answer. ``formats`` detects a model's
format from its chat template.

A format separates thinking from the answer piece by piece, without releasing part of a mark as text. It also has the
text that opens thinking at the end of a prompt, and the text that ends it when its budget is used. ``switches`` finds
the variables with which a chat template turns thinking on and off. Pure: the same text gives the same result, however
it was cut.
"""
