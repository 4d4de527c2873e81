"""What a command shows: one live line in a terminal, plain lines without one, JSON lines with `--json`; and errors."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from swarm.errors import SwarmError

P = ParamSpec("P")
T = TypeVar("T")
PLAIN_STATUS_EVERY_S = 10.0
PLAIN_CHANGE_EVERY_S = 0.4


def short_count(number: float, unit: str = "") -> str:
    """`1234567` -> `1.2 M`."""
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.0f} {prefix}{unit}".rstrip() if prefix == "" else f"{number:.1f} {prefix}{unit}"
        number /= 1000
    return f"{number:.1f} T{unit}"


class Reporter:
    """Writes to standard output in the form that fits.

    Args:
        as_json: One JSON object a line instead of text.
        live: Use a live line; none finds out whether standard output is a terminal.
    """

    def __init__(self, as_json: bool, live: bool | None = None) -> None:
        self._as_json = as_json
        self._live_wanted = not as_json and (sys.stdout.isatty() if live is None else live)
        self._live: Any = None
        self._last_status_s: float | None = None
        self._last_shown: object = None

    def say(self, text: str, kind: str, /, **fields: Any) -> None:
        """One lasting line: `text` for people, `kind` and `fields` for scripts."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
            return
        try:
            print(json.dumps({"kind": kind, **fields}) if self._as_json else text, flush=True)
        except BrokenPipeError:
            # whoever read our output has gone; the peer goes on without telling
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def status(self, text: str, now_s: float, notable: object = None, /, **fields: Any) -> None:
        """The state of things: replaces the live line; without one it is written when something notable happened.

        Args:
            text: For people.
            now_s: Monotonic time.
            notable: Written again soon when this changes, else every `PLAIN_STATUS_EVERY_S` seconds.
            fields: For scripts.
        """
        if self._live_wanted:
            self._update_live(text)
            return
        patience_s = PLAIN_STATUS_EVERY_S if notable == self._last_shown else PLAIN_CHANGE_EVERY_S
        if self._last_status_s is None or now_s - self._last_status_s >= patience_s:
            self._last_status_s, self._last_shown = now_s, notable
            self.say(text, "status", **fields)

    def close(self) -> None:
        """End the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _update_live(self, text: str) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(auto_refresh=False)
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def show_error(error: SwarmError, as_json: bool) -> None:
    """One sentence on standard error, or one JSON object on standard output."""
    if as_json:
        fields = {"code": error.code, "name": type(error).__name__, "message": error.message, "fix": error.fix}
        reasons = getattr(error, "reasons", None)
        if reasons:
            fields["reasons"] = reasons
        if remembered := getattr(error, "remembered", None):
            fields["remembered"] = list(remembered)
        print(json.dumps({"kind": "error", "ok": False, "exit_code": error.exit_code, "error": fields}), flush=True)
    else:
        print(f"swarm: {error}", file=sys.stderr, flush=True)


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turn a `SwarmError` of a command into its message and exit code. The command has an `as_json` parameter."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except SwarmError as error:
            show_error(error, bool(kwargs.get("as_json")))
            raise typer.Exit(error.exit_code) from None

    return wrapped
