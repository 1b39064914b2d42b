"""The console's page: its modules without a page, by Node's test runner, and rules that all its files keep."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from swarm.gateway.console.files import load_page_files
from tests.unit.gateway.node import PATIENCE_S, node

HERE = Path(__file__).parent
TESTS = sorted([*HERE.glob("page/*.test.mjs"), *HERE.glob("page_chat/*.test.mjs")])
PAGE = Path(__file__).parents[3] / "swarm" / "gateway" / "console" / "page"
FILES = sorted(PAGE.iterdir())
API_FILES = sorted((PAGE.parent / "api_page").iterdir())  # a page of its own, at /docs
SCRIPTS = [path for path in [*FILES, *API_FILES] if path.suffix == ".js"]
MOST_BYTES = 350_000
# Names that a document's own vocabulary needs; nothing is fetched from them.
VOCABULARY = {"www.w3.org"}
REGIONS = ["Conversations", "Swarm at a glance", "Conversation", "Answer", "Prompt", "Stages", "Recovery"]
REGIONS += ["Stages", "Recovery", "Charts", "Workers", "Events", "Requests", "Timeline", "Plan", "Logs"]
REGIONS += ["Connect a client", "Keys"]
HOST = re.compile(r"(?:https?:)?//([a-z0-9-]+(?:\.[a-z0-9-]+)+)", re.IGNORECASE)
IMPORT = re.compile(r"""(?:from|import)\s*\(?\s*["'](\./[^"']+)["']""")
# What could make markup of text or code of data, or a style that the page's policy refuses.
FORBIDDEN = re.compile(
    r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|setHTMLUnsafe|DOMParser|srcdoc|eval|execScript)\b"
    r"|document\.write|new Function|setTimeout\(\s*[\"'`]|setInterval\(\s*[\"'`]|javascript:"
    r"|\bstyle\s*:\s*[\"'`{]|\.cssText"
)


@pytest.mark.slow
@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(HERE)))
def test_modules_do_what_their_own_tests_say(path: Path) -> None:
    """Each file of Node's tests passes."""
    command = [node(), "--test", "--test-reporter=spec", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_page_weighs_little() -> None:
    """All its files together, as they are: what is sent is a quarter of that."""
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES


@pytest.mark.parametrize("path", [*FILES, *API_FILES], ids=lambda path: path.name)
def test_no_file_names_another_host(path: Path) -> None:
    """It works where there is no internet, and tells nobody that it is open."""
    named = {host.lower() for host in HOST.findall(path.read_text())}
    assert named <= VOCABULARY | {"127.0.0.1"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_text_never_becomes_markup_or_code(path: Path) -> None:
    """Nothing that a model or a client wrote can act, since nothing here could let it."""
    found = [line.strip() for line in path.read_text().splitlines() if FORBIDDEN.search(line)]
    assert found == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Whoever reads one can begin with those that it needs."""
    needs = {path.name: [name.removeprefix("./") for name in IMPORT.findall(path.read_text())] for path in SCRIPTS}
    while free := [name for name, others in needs.items() if not set(others) & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_is_imported_is_shipped(path: Path) -> None:
    """Each module that one imports lies beside it: a name mistyped fails here, not at a reader's."""
    wanted = {name.removeprefix("./") for name in IMPORT.findall(path.read_text())}
    assert wanted <= {other.name for other in FILES}


def test_lines_and_files_are_short_enough_to_be_read() -> None:
    """As everywhere in this house: 120 columns, and files that are taken in at once."""
    texts = {path.name: path.read_text().splitlines() for path in [*FILES, *API_FILES] if path.suffix != ".svg"}
    assert [name for name, lines in texts.items() if len(lines) > 400] == []
    long = [
        f"{name}:{number}" for name, lines in texts.items() for number, line in enumerate(lines, 1) if len(line) > 120
    ]
    assert long == []


def test_every_part_that_the_shell_mounts_is_there_with_its_place() -> None:
    """What app.js mounts has a module, which exports ``mount``, and an element of its name in the page."""
    parts = dict(re.findall(r"(\w+): \"\./(\w+\.js)\"", (PAGE / "app.js").read_text()))
    assert len(parts) >= 14
    markup = (PAGE / "index.html").read_text()
    for name, module in parts.items():
        assert f'id="{name}"' in markup
        assert re.search(r"^export function mount\(root, store", (PAGE / module).read_text(), re.MULTILINE), module


class _Markup(HTMLParser):
    """Notes what a strict policy would refuse, and what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []
        self.asked: set[str] = set()
        self.labels: list[str] = []
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.refused.append(f"{tag} {name}")
            if name in {"src", "href"} and not (value or "").startswith("#"):
                self.asked.add(value or "")
            if tag == "section" and name == "aria-label":
                self.labels.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._open in {"script", "style"} and data.strip():
            self.refused.append(f"{self._open} with text")


def test_the_markup_holds_nothing_inline_and_asks_only_for_what_is_shipped() -> None:
    """The gateway forbids inline code and style; the page has none, and all its regions. So has that of the API."""
    served = set(load_page_files()) | {"/openapi.json"}
    for page in (PAGE / "index.html", PAGE.parent / "api_page" / "docs.html"):
        markup = _Markup()
        markup.feed(page.read_text())
        assert markup.refused == []
        assert markup.asked <= served
        assert page.name != "index.html" or markup.labels == REGIONS


def test_every_custom_property_is_defined() -> None:
    """A colour that is used has a value: a name mistyped would be no colour at all, and no error."""
    words = "".join(path.read_text() for path in FILES if path.suffix in {".css", ".js"})
    used = set(re.findall(r"var\((--[\w-]+)\)", words))
    defined = set(re.findall(r"(--[\w-]+)\s*:", words)) | set(re.findall(r'"(--[\w-]+)":', words))
    assert used - defined == set()
