"""How models write tool calls. Each family has a module; ``families`` finds the model's by its chat template.

A family reads calls out of text piece by piece, without showing half a mark as text, and writes the grammar by
which a model is made to call. Pure: the same text gives the same parts, however it was cut.
"""
