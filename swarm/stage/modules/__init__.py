"""Modules of our own in the place of a model's, where what those compute is recognised by its code."""
