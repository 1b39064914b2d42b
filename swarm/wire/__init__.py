"""What machines say to each other, and how it travels. Imports nothing else of Swarm but errors, parameters, the
version, and ``service.handed``, the doors that systemd holds open.

``messages`` has one struct per message; ``codec`` makes frames of them and checks what comes; ``tensors`` carries
arrays. ``channel`` are the ends of doors on a loop, ``dealer`` knocks there; ``pull`` and ``push`` carry steps;
``door`` reads what comes in.
"""
