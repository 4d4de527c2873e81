"""What people see of the demo: a live panel in a terminal, plain lines without one, and the closing summary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from swarm.demo.orchestrator import Observer, Snapshot

PLAIN_EVERY_S = 10.0
CHART_WIDTH, CHART_HEIGHT = 64, 10


class DemoView(Observer):
    """Shows the demo on `stream`: live where it is a terminal, one line now and then where it is not."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.console = Console(file=stream or sys.stdout, highlight=False)
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._last_plain_s = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=40),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._progress.add_task("starting", total=1)
            self._live = Live(self._progress, console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def update(self, snapshot: Snapshot) -> None:
        if self._live is not None and self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0],
                description=snapshot.phase,
                completed=snapshot.step,
                total=snapshot.steps,
            )
            self._live.update(Group(self._panel(snapshot), self._progress), refresh=True)
        elif snapshot.elapsed_s - self._last_plain_s >= PLAIN_EVERY_S:
            self._last_plain_s = snapshot.elapsed_s
            self.say("  ".join(f"{name} {value}" for name, value in _fields(snapshot)))

    def _panel(self, snapshot: Snapshot) -> RenderableType:
        table = Table.grid(padding=(0, 3))
        fields = _fields(snapshot)[1:]
        table.add_row(*(Text(name, style="dim") for name, _ in fields))
        table.add_row(*(Text(value, style="bold") for _, value in fields))
        return table


def _fields(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [
        ("step", f"{snapshot.step}/{snapshot.steps}"),
        ("held-out loss", "-" if snapshot.loss is None else f"{snapshot.loss:.3f}"),
        ("tokens/s", f"{snapshot.tokens_per_s:,.0f}"),
        ("peers", snapshot.peers),
        ("replicas >=", "-" if snapshot.min_replicas is None else str(snapshot.min_replicas)),
        ("failed calls", str(snapshot.failed_calls)),
        ("masked", f"{snapshot.masked_fraction:.2%}"),
    ]


def loss_chart(
    losses: Sequence[tuple[int, float]],
    *,
    width: int = CHART_WIDTH,
    height: int = CHART_HEIGHT,
    ascii_only: bool = False,
) -> str:
    """A loss curve as text, `height` lines high. Empty for fewer than two points."""
    if len(losses) < 2:
        return ""
    low, high = min(v for _, v in losses), max(v for _, v in losses)
    span = (high - low) or 1.0
    last = losses[-1][0] or 1
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in losses:
        columns[min(width - 1, step * width // last)].append(value)
    mark = "*" if ascii_only else "•"
    bar, corner, line = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    rows = [[" "] * width for _ in range(height)]
    for x, values in enumerate(columns):
        if values:
            y = round((high - sum(values) / len(values)) / span * (height - 1))
            rows[y][x] = mark
    labels = [f"{high - span * y / (height - 1):6.2f} {bar}" for y in range(height)]
    text = [label + "".join(row).rstrip() for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*text, f"       {corner}{line * width}", f"       0{'step':^{width - 1 - len(str(last))}}{last}"])


def summary(result: dict[str, Any], ascii_only: bool = False) -> str:
    """The closing summary as plain text."""
    lines = [loss_chart(result["losses"], ascii_only=ascii_only), ""]
    for name, value in _summary_fields(result):
        lines.append(f"{name:>22}  {value}")
    for window in result["windows"]:
        lines.append(
            f"{window['fault']:>22}  loss {_number(window['before'])} before, {_number(window['after'])} after"
        )
    lines.append("")
    if result["ok"]:
        lines.append("The run survived: the loss kept falling through every fault." if result["killed"] else "Done.")
    else:
        lines += ["The demo did not reach its goals:", *(f"  - {problem}" for problem in result["problems"])]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def _summary_fields(result: dict[str, Any]) -> list[tuple[str, str]]:
    fields = [
        ("held-out loss", f"{_number(result['first_loss'])} -> {_number(result['final_loss'])} nats per byte"),
        ("without experts", _number(result["final_loss_experts_masked"])),
        ("byte frequencies alone", _number(result["unigram_loss"])),
        ("steps, tokens/s", f"{result['steps']}, {result['tokens_per_s']:,.0f}"),
        ("failed expert calls", f"{result['failed_expert_calls']} ({result['masked_fraction']:.2%} of answers masked)"),
    ]
    if result["spread_after_round"] is not None:
        before, after = result["spread_before_round"], result["spread_after_round"]
        fields.append(("trainers differ by", f"{before:.2g} before the last round, {after:.2g} after it"))
    for name, step in result["resumed"].items():
        fields.append(("resumed", f"{name} from another trainer's state at step {step}"))
    fields.append(("seconds", f"{result['seconds']:.0f}"))
    return fields
