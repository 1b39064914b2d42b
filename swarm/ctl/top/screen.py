"""Terminal of ``swarmctl top``, with curses: draws lines, reads keys, and always restores the terminal."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from swarm.ctl.top.keys import TopState, drop_missing, handle_key
from swarm.ctl.top.view import StatusLine, TopLine, render_screen, selectable_items

if TYPE_CHECKING:
    from swarm.ctl.top.poller import TopPoller

_KEY_NAMES: Final = {curses.KEY_UP: "up", curses.KEY_DOWN: "down", ord("k"): "up", ord("j"): "down"}
_REFRESH_MS: Final = 250  # Maximum time between two refreshes from the poller.


def run(poller: TopPoller) -> None:
    """Run until q or Ctrl-C. Raises SwarmError if polling fails for good, ConfigError if the terminal is not
    capable."""
    from swarm.errors import ConfigError

    _set_locale()
    try:
        curses.setupterm()
        if not curses.tigetstr("cup"):
            raise curses.error("its cursor can't be moved")
        curses.wrapper(_loop, poller)
    except KeyboardInterrupt:
        return
    except curses.error as error:
        raise ConfigError(f"this terminal can't be drawn on ({error}): set TERM, or take --json") from None
    if poller.problem is not None:
        raise poller.problem


def _set_locale() -> None:
    """Select the locale, because curses writes in its encoding.

    A configured locale may be missing here, for example after ssh from another machine; then use a minimal UTF-8
    locale.
    """
    for name in ("", "C.UTF-8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            return


def _loop(window: curses.window, poller: TopPoller) -> None:
    colours = _prepare(window)
    state = TopState()
    while not state.ends and poller.problem is None:
        known = poller.data
        state = drop_missing(state, selectable_items(known))
        if (result := poller.take_result()) is not None:
            state = replace(state, said=result)
        height, width = window.getmaxyx()
        _draw(
            window,
            render_screen(known, state.chosen, StatusLine(state.said, state.asked is not None), width, height),
            colours,
        )
        key = window.getch()
        if key in (-1, curses.KEY_RESIZE):
            continue
        name = _KEY_NAMES.get(key, chr(key) if 0 < key < 128 else "")
        state, order = handle_key(state, name, selectable_items(known))
        if order is not None:
            state = replace(state, said=poller.submit(order))


def _prepare(window: curses.window) -> bool:
    """Configure the window. Return whether to use colours (which NO_COLOR disables)."""
    window.timeout(_REFRESH_MS)
    with contextlib.suppress(curses.error):  # Terminals that can't hide the cursor.
        curses.curs_set(0)
    if os.environ.get("NO_COLOR") or not curses.has_colors():
        return False
    curses.use_default_colors()
    curses.init_pair(1, curses.COLOR_CYAN, -1)
    return True


def _draw(window: curses.window, lines: list[TopLine], colours: bool) -> None:
    window.erase()
    for number, line in enumerate(lines):
        style = curses.A_REVERSE if line.is_selected else curses.A_NORMAL
        if line.is_title:
            style |= curses.color_pair(1) if colours else curses.A_BOLD
        # Writing the last cell raises because the cursor can't advance; and the screen may just have become smaller.
        with contextlib.suppress(curses.error):
            window.addstr(number, 0, line.text, style)
    window.refresh()
