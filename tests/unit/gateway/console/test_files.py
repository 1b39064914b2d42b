"""The page's files: what is shipped is served, whole and packed, and all of it fits."""

from __future__ import annotations

import gzip
from pathlib import Path

from swarm.gateway.console.files import PAGE, load_page_files


def test_files_are_served_below_the_console_and_the_first_at_the_root(tmp_path: Path) -> None:
    for name, text in (("index.html", "<p>"), ("app.js", "1"), ("more/a.svg", "<svg>"), ("note.py", "no"), ("x", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files = load_page_files(tmp_path)
    assert set(files) == {"/", "/console/app.js", "/console/more/a.svg"}
    assert files["/"].kind.startswith("text/html")
    assert gzip.decompress(files["/"].packed) == b"<p>"
    assert files["/"].headers(is_packed=True)["content-encoding"] == "gzip"
    assert "content-encoding" not in files["/"].headers(is_packed=False)


def test_a_tag_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text("1")
    before = load_page_files(tmp_path)["/console/app.js"].tag
    assert load_page_files(tmp_path)["/console/app.js"].tag == before
    (tmp_path / "app.js").write_text("2")
    assert load_page_files(tmp_path)["/console/app.js"].tag != before


def test_no_route_is_hidden_by_a_file() -> None:
    taken = {f"/console/{name}" for name in ("me", "live", "orders", "plan", "logs", "keys", "trace")}
    assert not taken & set(load_page_files())
    assert {"/", "/docs", "/console/docs.js"} <= set(load_page_files())
    assert (PAGE / "index.html").is_file()
