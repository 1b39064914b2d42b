"""Executor that computes with torch: batches in, hidden states or tokens out.

Input: a ``Batch`` of rows, or a range of layers to prepare (``stage/executor.py`` defines the interface). Output:
``ForwardResult``, and the capacity of a range. Rules: a row's bits depend on its own sequence alone, whatever else is
in the batch; a token depends on its sequence, its seed and its request alone; a kernel is called exact only if that has
been proven on this machine; a kind of model that is not computed correctly when cut into stages is refused.

``torch_executor`` is the entry point. ``model_kernels`` chooses the kernels, ``memory_plan`` divides the memory,
``loaded_layers`` holds the stages, and ``rechecks`` computes layers again for a comparison. ``forward`` runs a batch
through a stage. ``batch_sampling`` draws tokens by the rule in ``sampling``, with our kernel (``native_sampling``)
where it is built, and ``grammars`` decides which tokens are allowed. ``measure`` times this device (``device``;
``cpu_quota`` reads a container's limit). ``selfcheck`` compares a model cut into stages with the whole model.
``dry_runs`` warms a stage up, compares its program with its modules and tests its device. ``portability`` and
``kernel_report`` describe which kernels decide the bits.
"""
