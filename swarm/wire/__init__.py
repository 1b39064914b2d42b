"""What machines say to each other, and how it travels. Imports nothing else of Swarm but errors and parameters.

``messages`` has one struct per message; ``codec`` makes frames of them and checks what comes; ``tensors`` carries
arrays; ``channel`` are the sockets, ``door`` the listening ends.
"""
