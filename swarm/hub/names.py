"""Names of models on a hub.

====================================  ================================================================
``owner/name``                        the repository's safetensors, or its only GGUF model
``owner/name:Q4_K_M``                 its GGUF model of this quantization
``owner/name/folder/file.gguf``       its GGUF model with this file, one of several if the model is split
====================================  ================================================================

Each of them may end with ``@revision``: a branch, a tag or a commit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*?)"
    r"(?:/(?P<file>(?:[^/\\@:.\0][^/\\@:\0]*/)*[^/\\@:.\0][^/\\@:\0]*\.gguf)|:(?P<quantization>\w[\w.-]*))?"
    r"(?:@(?P<revision>\w[\w./-]*))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub as a person names it."""

    repository: str
    revision: str | None = None
    file: str = ""  # a GGUF file, by its path in the repository
    quantization: str = ""  # of a GGUF model, as in "Q4_K_M"

    @property
    def has_choice(self) -> bool:
        """Whether the name chooses one GGUF model of the repository."""
        return bool(self.file or self.quantization)

    def __str__(self) -> str:
        choice = f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        return f"{self.repository}{choice}" + (f"@{self.revision}" if self.revision else "")


def parse_name(text: str) -> HubName | None:
    """Return the parts of a name; None if the text is no name of a model on a hub."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    return HubName(match["repository"], match["revision"], match["file"] or "", match["quantization"] or "")
