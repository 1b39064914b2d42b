"""mkdocs hook and griffe extension: what the site's tools need to read this repository's Markdown and docstrings.

In the repository, pages link to each other and to source files by relative paths. The site gets a copy of each linked
file outside of docs/, below ``project/``, and the links are rewritten. A link to a missing file stays as
it is, so that a strict build fails.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "project"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
FENCE = re.compile(r"^```(\w+) (\w+)$", re.MULTILINE)
ROLE = re.compile(r":(?:class|exc|func|meth|mod):`~?([^`]+)`")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[#)])")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for name in PAGES:
        files.append(
            File.generated(config, f"{FOLDER}/{name}", content=_rewrite((ROOT / name).read_text(), ".", FOLDER))
        )
    linked = {path for file in files.documentation_pages() for path in _outside(file)}
    for path in sorted(linked - set(PAGES)):
        files.append(File.generated(config, f"{FOLDER}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    markdown = FENCE.sub(r'```\1 title="\2"', markdown)
    if uri.startswith(f"{FOLDER}/"):
        return markdown
    return _rewrite(markdown, f"docs/{posixpath.dirname(uri)}", posixpath.dirname(uri))


class Roles(griffe.Extension):
    """Docstrings with the roles of reStructuredText as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)


def _outside(file: File) -> Iterator[str]:
    """Files outside of docs/ that a page links to."""
    if file.src_uri.startswith(f"{FOLDER}/"):
        text, folder = (ROOT / posixpath.basename(file.src_uri)).read_text(), "."
    else:
        text, folder = file.content_string, f"docs/{posixpath.dirname(file.src_uri)}"
    for target in LINK.findall(text):
        path = posixpath.normpath(posixpath.join(folder, target))
        if not path.startswith("docs/") and (ROOT / path).is_file():
            yield path


def _rewrite(text: str, source: str, place: str) -> str:
    """Rewrite the links of a text. source: its folder in the repository; place: its folder on the site."""

    def target_on_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(source, match[1]))
        if not (ROOT / path).is_file():
            return match[1]
        site = path.removeprefix("docs/") if path.startswith("docs/") else f"{FOLDER}/{path}"
        return posixpath.relpath(site, place or ".")

    return LINK.sub(target_on_site, text)
