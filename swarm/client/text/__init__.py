"""Text to token ids and back, piece by piece, with the model's own tokenizer and chat template (without transformers);
and checks of grammars.

``tokenizer`` is the entry point. ``vocabulary`` encodes within bounds, and ``template`` is the sandbox of chat
templates. A template is rewritten when it is loaded (``rewriting``): ``spelling`` separates its control tokens from
look-alikes in messages, and ``budget`` limits its time and output. ``assets`` caches the model's tokenizer files on
this machine.
"""
