"""A model's folder on disk, and a range of its layers as modules.

Input: a folder, or a model's name on a hub, and a range of layers. Output: the manifest that the broker plans with, and
a ``Stage`` that runs these layers. Rules: the model's own code from transformers runs, or the model is refused with the
reason; only the tensors of the range are fetched and read; layers that are loaded already are shared, not copied.

``kinds`` refuses models by ``config.json`` alone, ``checkpoint`` describes the folder, ``identity`` computes the
digests of its files, and ``adapter_files`` finds those of an adapter; none needs torch.
``configuration`` reads ``config.json`` as transformers does, ``build`` makes modules, ``conversion`` reads their
tensors, and ``loading`` decides what remains to be read. ``adapters`` replaces forwards of older kinds of models.
``rope`` and ``portable_math`` compute the tables of rotary positions with the same bits on every processor. ``recipes``
translates a stage of known modules into a ``program``, which runs a step in one call.
"""
