"""Text for token ids and back, piece by piece, by the model's own tokenizer and chat template; grammars, checked. No
transformers. ``assets``: the model's own files on this machine.

``tokenizer`` has the whole; ``vocabulary`` encodes within bounds, ``template`` is the sandbox of chat templates. A
template is rewritten when it is loaded (``rewriting``): ``spelling`` tells its special tokens from their look-alikes in
messages, ``budget`` limits what it spends."""
