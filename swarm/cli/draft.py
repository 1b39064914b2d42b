"""Process of the draft model: ``python -m swarm.cli.draft MODEL``, started by the broker only.

Requests come from stdin, messages go to stdout (``wire.draft_messages``); everything that libraries print goes to
stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from swarm.cli.up.processes import disable_core_dumps, end_with_starter


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the broker is gone; return the exit code."""
    end_with_starter()  # also while it is stopped and can't see the end of stdin
    disable_core_dumps()  # its memory contains prompts and answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the broker's, which ends this process
    parser = argparse.ArgumentParser(prog="python -m swarm.cli.draft", description="Process of the draft model.")
    parser.add_argument("model", help="directory or GGUF file of the draft model")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute [default: all cores]")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    options = parser.parse_args(arguments)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    from swarm.cli.meta.packages import missing_packages
    from swarm.wire.draft_messages import DraftUnusable, encode_frame

    if missing := missing_packages("worker"):
        out.write(encode_frame(DraftUnusable(missing)))
        return os.EX_CONFIG

    from swarm.stage.shell.openmp import configure_openmp

    configure_openmp(options.threads)  # before torch is imported
    from swarm import log
    from swarm.config import LogSettings
    from swarm.draft.process import serve

    log.configure(LogSettings(level=options.log_level, format=options.log_format))
    return serve(options.model, options.threads, sys.stdin.buffer, out)


if __name__ == "__main__":
    os._exit(main())  # the thread that reads from stdin can't be ended otherwise
