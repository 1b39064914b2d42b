"""Completion service: turns completion requests into requests of the swarm, and their tokens into the parts of answers.

``service`` is the interface for the completion handler, and makes token ids. ``served_model`` is the gateway's
description of the model. ``assembler`` turns pieces into text, calls and ends (pure). ``answer_stream`` is an answer in
progress.
"""
