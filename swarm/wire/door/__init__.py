"""Doors: listening sockets that read their connections themselves, within bounds of frames, bytes and time.

``listener`` is a door, ``connection`` one connection, ``zmtp`` its bytes, ``mechanisms`` who may speak, ``keys`` the
secret in an address, ``strangers`` who gives way where too many shake hands, ``peers`` what is told of them and whose a
name is, ``watch`` how a door learns that a descriptor has news, ``relay`` the way to doors that nobody can knock at.
"""
