"""API keys of the HTTP gateway: ``keys`` creates and checks them (pure), ``file`` stores them, for ``swarmctl keys``
and gateways alike.

A key's secret is 256 random bits, so its hash can't be reversed by guessing, however fast it is: a salted BLAKE2b is
enough and takes microseconds. Slow hashes are for passwords chosen by people; here a slow hash would only let strangers
waste our CPU time with wrong keys.
"""
