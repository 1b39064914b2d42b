"""Run ``swarm`` as ``python -m swarm``."""

from __future__ import annotations

from swarm.cli.main import main

if __name__ == "__main__":
    main()
