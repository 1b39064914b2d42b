"""How long each file of tests takes, so that the longest start first and the workers of a run end together.

``pytest tests/faults --record-durations`` measures a folder again. Only the order matters, so an old figure of another
machine does no harm.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("durations.json")
_LEAST_S = 2.0  # files below this are left out: they fill the gaps at the end


def read(file: Path = FILE) -> dict[str, float]:
    """Return the seconds of each file, by its path from the root of the checkout."""
    return json.loads(file.read_text()) if file.exists() else {}


def record(stats: Mapping[str, Iterable[Any]], file: Path = FILE) -> None:
    """Replace the figures of the files that this run has executed."""
    took: defaultdict[str, float] = defaultdict(float)
    for reports in stats.values():
        for report in reports:
            if isinstance(duration := getattr(report, "duration", None), float):
                took[report.nodeid.partition("::")[0]] += duration
    all_files = {**read(file), **took}
    kept = {path: round(seconds) for path, seconds in sorted(all_files.items()) if seconds >= _LEAST_S}
    file.write_text(json.dumps(kept, indent=2) + "\n")
