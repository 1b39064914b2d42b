"""Auth: which keys may connect to the broker's sockets, and the messages about keys.

In: new connections with their keys, clients' and workers' messages, and the key registry on disk. Out: an allow or deny
for each connection and message, answers to messages about keys, and an event for each revoked key. Rules: a change of
keys is on the disk before it takes effect and before its client gets an answer; local peers need no key.

``access`` decides which key may do what; ``writer`` writes changes to the key registry in a thread, one after the
other; ``service`` connects both with the broker's sockets, and announces the broker on the network. Used by the process
(``message_server``, ``service``) only: the core sees accounts and owners, not keys.
"""
