"""Python client library for a swarm. It needs neither the model nor torch: it downloads the tokenizer's files from the
broker."""
