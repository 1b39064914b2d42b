"""A model: its folder on disk, and a range of its layers as modules.

Comes in: a folder, or a model's name on a hub, and a range of layers. Goes out: the manifest that the broker plans
with, and a ``Stage`` that runs these layers. Rules: the model's own code from transformers runs, or the model is
refused with the reason; only the tensors of the range are fetched and read; layers that are loaded already are shared,
not copied.

``checkpoint`` is the folder, ``identity`` by what its files are known: neither needs torch. ``configuration`` reads
``config.json`` as transformers does, ``build`` makes modules, ``conversion`` reads their tensors, ``loading`` says what
is still to be read. ``rope`` and ``byrule`` compute the tables of rotary positions alike on every processor.
``recipes`` writes a stage whose parts are all known as a ``program``, which runs a step in one call.
"""
