"""Weights of a few bits: small codes, and a scale for each output and group of inputs.

Input: the quantized tensors of a file, in the file's own encoding, or plain weights and a setting. Output: a
:class:`~swarm.stage.quantization.formats.QuantizedWeight`, from which our kernels pack a matrix, or its values in the
model's dtype where they can't. Rules: the codes and scales of a file are used exactly as they are; nothing is read
before a stage needs it; a format that is not supported is refused before anything is loaded.

``formats`` defines what a quantized matrix is, ``tensors`` holds its numbers, and ``stored`` describes it in a file.
"""
