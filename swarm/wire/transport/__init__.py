"""ZMTP implementation of the listening ends: handshakes, framing and message decoding, with limits that libzmq lacks.

* ``listener``: a listening socket with its connections; ``connection``: one of them; ``zmtp``: its bytes and messages;
* ``server_handshake``, ``curve`` and ``client_handshake``: the security mechanisms; ``curve_session``: their
  encryption;
* ``keys``: tokens and keys in endpoints, and the authentication policy of a listener;
* ``accept``: accepting connections, and limits for those that have not authenticated;
* ``peers``: authenticated connections, their identities, and the events about them;
* ``io_loop``: notification when a descriptor becomes readable; ``connect``: outgoing connections from a plain thread;
* ``unix_socket``: the faster way between processes of one host; ``relay``: the way to listeners behind a firewall or
  NAT.
"""
