"""Terminal of ``swarmctl top``, with curses: draws lines, reads keys, and always restores the terminal."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from swarm.ctl.top.keys import Screen, pressed, still_there
from swarm.ctl.top.view import Line, Said, items, screen

if TYPE_CHECKING:
    from swarm.ctl.top.asking import Asking

_KEYS: Final = {curses.KEY_UP: "up", curses.KEY_DOWN: "down", ord("k"): "up", ord("j"): "down"}
_REFRESH_MS: Final = 250  # Maximum time between two refreshes from the poller.


def run(asking: Asking) -> None:
    """Run until q or Ctrl-C. Raises SwarmError if polling fails for good, ConfigError if the terminal is not
    capable."""
    from swarm.errors import ConfigError

    _speak_utf8()
    try:
        curses.setupterm()
        if not curses.tigetstr("cup"):
            raise curses.error("its cursor can't be moved")
        curses.wrapper(_loop, asking)
    except KeyboardInterrupt:
        return
    except curses.error as error:
        raise ConfigError(f"this terminal can't be drawn on ({error}): set TERM, or take --json") from None
    if asking.problem is not None:
        raise asking.problem


def _speak_utf8() -> None:
    """Select the locale, because curses writes in its encoding.

    A configured locale may be missing here, for example after ssh from another machine; then use a minimal UTF-8
    locale.
    """
    for name in ("", "C.UTF-8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            return


def _loop(window: curses.window, asking: Asking) -> None:
    colours = _prepare(window)
    state = Screen()
    while not state.ends and asking.problem is None:
        known = asking.known
        state = still_there(state, items(known))
        if (said := asking.take_said()) is not None:
            state = replace(state, said=said)
        height, width = window.getmaxyx()
        _draw(window, screen(known, state.chosen, Said(state.said, state.asked is not None), width, height), colours)
        key = window.getch()
        if key in (-1, curses.KEY_RESIZE):
            continue
        name = _KEYS.get(key, chr(key) if 0 < key < 128 else "")
        state, order = pressed(state, name, items(known))
        if order is not None:
            state = replace(state, said=asking.order(order))


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


def _draw(window: curses.window, lines: list[Line], colours: bool) -> None:
    window.erase()
    for number, line in enumerate(lines):
        style = curses.A_REVERSE if line.is_chosen else curses.A_NORMAL
        if line.is_title:
            style |= curses.color_pair(1) if colours else curses.A_BOLD
        # Writing the last cell raises because the cursor can't advance; and the screen may just have become smaller.
        with contextlib.suppress(curses.error):
            window.addstr(number, 0, line.text, style)
    window.refresh()
