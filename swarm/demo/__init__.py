"""The embedded demonstration model: a Llama of under 5 MB that writes stories of a little village.

``tools/train_demo.py`` makes it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def model_path() -> Path:
    """Return the model's directory, in ordinary Hugging Face form."""
    return Path(str(files(__name__) / "village"))
