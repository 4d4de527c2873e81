"""What the orchestrator of the demo knows: collected from the trainers' events, judged at the end. No I/O but files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_FINAL_LOSS = 2.9
MIN_EXPERT_BENEFIT = 0.1
MAX_SPREAD_AFTER = 1e-6
WINDOW_MEASUREMENTS = 6


@dataclass(slots=True)
class TrainerRecord:
    """One trainer, over all its lives: totals of ended lives are kept in `earlier`."""

    step: int = 0
    started: int = 0
    resumed_at: int | None = None
    current: dict[str, int] = field(default_factory=dict)
    earlier: dict[str, int] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def total(self, name: str) -> int:
        return self.current.get(name, 0) + self.earlier.get(name, 0)

    def on_started(self, event: Mapping[str, Any]) -> None:
        for name, value in self.current.items():
            self.earlier[name] = self.earlier.get(name, 0) + value
        self.current = {}
        self.started += 1
        if self.started > 1 and event["synced_from"]:
            self.resumed_at = int(event["step"])


@dataclass(frozen=True, slots=True)
class FaultMark:
    """A fault that happened, and how many held-out measurements had been made by then."""

    fault: str
    measurements: int


class DemoRecord:
    """Everything measured during one demo.

    Attributes:
        losses: (step, held-out loss in nats per byte), in order.
        loss_masked: The last held-out loss with the experts' outputs zeroed.
    """

    def __init__(self, trainers: Sequence[str]) -> None:
        self.trainers = {name: TrainerRecord() for name in trainers}
        self.losses: list[tuple[int, float]] = []
        self.loss_masked: float | None = None
        self.marks: list[FaultMark] = []
        self.skipped = 0

    def take(self, trainer: str, event: Mapping[str, Any]) -> None:
        """Digest one event of a trainer; events of other kinds than the demo's are ignored."""
        record = self.trainers[trainer]
        match event.get("kind"):
            case "DemoStarted":
                record.on_started(event)
                record.step = int(event["step"])
            case "DemoProgress":
                record.step = int(event["step"])
                record.current = {name: int(event[name]) for name in ("tokens", "failed_calls", "routed", "masked")}
            case "DemoHeldOut":
                if not self.losses or event["step"] > self.losses[-1][0]:
                    self.losses.append((int(event["step"]), float(event["loss"])))
                if event.get("loss_masked") is not None:
                    self.losses[-1] = (int(event["step"]), float(event["loss"]))
                    self.loss_masked = float(event["loss_masked"])
            case "DemoRound":
                record.rounds.append(dict(event))
            case "DemoStepSkipped":
                self.skipped += 1

    def mark(self, fault: str) -> None:
        """Say that a fault happens now."""
        self.marks.append(FaultMark(fault, len(self.losses)))

    @property
    def measured_since_fault(self) -> int:
        """Held-out measurements since the last fault, or since the start."""
        return len(self.losses) - (self.marks[-1].measurements if self.marks else 0)

    @property
    def step(self) -> int:
        """The furthest trainer's step."""
        return max((t.step for t in self.trainers.values()), default=0)

    def total(self, name: str) -> int:
        """Sum over all trainers and lives of `tokens`, `failed_calls`, `routed` or `masked`."""
        return sum(t.total(name) for t in self.trainers.values())

    @property
    def masked_fraction(self) -> float:
        """Share of (token, expert) pairs that got no answer and were left out of the mixture."""
        return self.total("masked") / max(1, self.total("routed"))

    def windows(self) -> list[dict[str, Any]]:
        """For each fault the mean of up to six held-out losses before and after it."""
        result = []
        values = [loss for _, loss in self.losses]
        for mark in self.marks:
            before = values[: mark.measurements][-WINDOW_MEASUREMENTS:]
            after = values[mark.measurements :][:WINDOW_MEASUREMENTS]
            result.append({"fault": mark.fault, "before": _mean(before), "after": _mean(after)})
        return result

    def spreads(self, survivors: Sequence[str]) -> tuple[float, float] | None:
        """Largest difference between two survivors' parameters before and after the last round that they shared.

        Rounds that went without a fault for both come first: a fault in a round is allowed to leave parts of it out.
        """
        import numpy as np

        latest: tuple[tuple[bool, int], dict[str, Any], dict[str, Any]] | None = None
        for i, a in enumerate(survivors):
            for b in survivors[i + 1 :]:
                for one in self.trainers[a].rounds:
                    for other in self.trainers[b].rounds:
                        same = one["group"] == other["group"]
                        there = same and Path(one["file"]).exists() and Path(other["file"]).exists()
                        rank = (bool(one["whole"] and other["whole"]), int(one["number"]))
                        if there and (latest is None or rank > latest[0]):
                            latest = (rank, one, other)
        if latest is None:
            return None
        difference = np.abs(np.load(latest[1]["file"]) - np.load(latest[2]["file"]))
        return float(difference[0].max()), float(difference[1].max())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def judge(result: Mapping[str, Any], *, faults: bool, builtin_text: bool) -> list[str]:
    """What keeps a demo from having succeeded; empty if nothing does.

    Args:
        result: The demo's result with the keys of its JSON line.
        faults: Whether faults were injected.
        builtin_text: The text was the default one, for which the absolute bound on the loss holds.
    """
    problems: list[str] = []

    def demand(condition: bool, otherwise: str) -> None:
        if not condition:
            problems.append(otherwise)

    final, masked, unigram = result["final_loss"], result["final_loss_experts_masked"], result["unigram_loss"]
    if final is None or masked is None:
        return ["no trainer measured the final held-out loss"]
    bound = MAX_FINAL_LOSS if builtin_text else unigram
    demand(final <= bound, f"the final held-out loss {final:.3f} is above {bound:.3f}")
    demand(masked >= final + MIN_EXPERT_BENEFIT, f"the experts help less than {MIN_EXPERT_BENEFIT} nats per byte")
    before, after = result["spread_before_round"], result["spread_after_round"]
    if len(result["trainers"]) > 1:
        demand(before is not None, "no two surviving trainers shared an averaging round")
        demand(before is None or before > 0, "the trainers did not differ before the last round")
        demand(after is None or after <= MAX_SPREAD_AFTER, f"the trainers differ by {after} after the last round")
    if faults:
        demand(len(result["killed"]) == 2 and len(result["frozen"]) == 1, "not every planned fault happened")
        for window in result["windows"]:
            if window["before"] is None or window["after"] is None:
                problems.append(f"the loss around {window['fault']!r} was not measured")
            else:
                demand(window["after"] < window["before"], f"the loss did not fall after {window['fault']!r}")
        demand(bool(result["resumed"]), "the restarted trainer did not take over the others' state")
    demand(not result["failed_processes"], f"processes failed: {', '.join(result['failed_processes'])}")
    return problems
