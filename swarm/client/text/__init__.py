"""Text for token ids and back, piece by piece, by the model's own tokenizer and chat template; grammars, checked. No
transformers. ``assets``: the model's own files on this machine."""
