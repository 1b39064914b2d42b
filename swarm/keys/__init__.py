"""API keys: ``keys`` makes and recognises them (pure), ``file`` keeps them, for ``swarmctl keys`` and gateways alike.

A key's secret is 256 random bits, so its hash can't be guessed back however fast it is: a salted BLAKE2b does, and
costs microseconds. A slow hash is for what people think up; here it would only let strangers burn
our time with wrong keys.
"""
