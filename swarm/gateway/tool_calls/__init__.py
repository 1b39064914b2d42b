"""Tool-call formats of models, one module per family of models; ``formats`` detects a model's format from its chat
template.

A format parses calls from text piece by piece, without releasing part of a mark as text, and generates the grammar that
forces a model to call. Pure: the same text gives the same result, however it was cut.
"""
