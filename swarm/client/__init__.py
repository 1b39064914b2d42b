"""The client library. Needs neither the model nor torch: the tokenizer's files come from the broker."""
