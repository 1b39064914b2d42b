"""Authentication and authorization of peers from other machines.

Decides which machines may connect, under which name and role, and which messages each role may send.

* ``broker_keys``: the broker's own key, and its rotation;
* ``invitation``: one line of text that admits a new machine; ``enrol``: using it;
* ``registry``: members and invitations by key (pure); ``registry_file``: its file;
* ``key_proof``: proof that an enrolled key belongs to the sender (pure); ``permissions``: messages allowed per role
  (pure);
* ``worker_address``: the addresses at which a worker may be reached (pure); ``discovery``: brokers on the local
  network;
* ``memberships``: swarms that this machine has joined; ``rotation``: change of its key there; ``access``: the
  credentials for a broker.

The handshakes are in ``swarm.wire.transport``.
"""
