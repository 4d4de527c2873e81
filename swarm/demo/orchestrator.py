"""Runs the demo: starts the processes, injects the faults, collects what the trainers measure, judges the outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from swarm.demo.corpus import Corpus
from swarm.demo.model import CONTEXT_BYTES, DIM, INNER
from swarm.demo.options import GRID, DemoOptions
from swarm.demo.record import WINDOW_MEASUREMENTS, DemoRecord, judge
from swarm.demo.trainer import HOLD_FILE
from swarm.errors import ProcessError, SwarmError, UsageError
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from swarm.observe.report import SwarmView
from swarm.simulation.faults import Fault, FaultTimeline, apply
from swarm.simulation.local import LocalSwarm

EXPERT_LR = 2e-3
AVERAGE_EVERY = 20
MEASUREMENTS = 60
FREEZE_S = 5.0
POLL_S = 0.25
VIEW_EVERY_S = 1.0
START_TIMEOUT_S = 120.0
STALL_S = 120.0
"""The demo gives up when no trainer makes a step for this long."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the live view shows."""

    phase: str
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float
    peers: str
    min_replicas: int | None
    failed_calls: int
    masked_fraction: float
    elapsed_s: float


class Observer:
    """What the orchestrator tells while it runs. Does nothing; views override what they show."""

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""

    def update(self, snapshot: Snapshot) -> None:
        """The present state, a few times a second."""


def timeline(options: DemoOptions) -> FaultTimeline:
    """The planned faults, in training steps."""
    if not options.faults:
        return FaultTimeline([])
    victim = f"trainer-{options.trainers - 1}"
    frozen, killed = "host-0", f"host-{options.hosts - 1}"
    return FaultTimeline(
        [
            Fault(0.15 * options.steps, "freeze", frozen, FREEZE_S),
            Fault(0.30 * options.steps, "kill", killed),
            Fault(0.42 * options.steps, "kill", victim),
            Fault(0.46 * options.steps, "restart", victim),
        ]
    )


def run_demo(options: DemoOptions, observer: Observer | None = None) -> dict[str, Any]:
    """Run the demo to its end and return its result: the keys of the JSON line, and `losses` and `problems` on top.

    Raises:
        UsageError: The text or the device cannot be used.
        ProcessError: A process could not be started, or training stalled.
    """
    began = time.monotonic()
    check_device(options.device)
    corpus = Corpus.load(options.data, CONTEXT_BYTES)
    grid = ExpertGrid(
        options.pattern,
        "ffn",
        config={"hid": DIM, "inner": INNER},
        replicas=min(2, options.hosts),
        optimizer=OptimizerSpec("adam", lr=EXPERT_LR),
    )
    observer = observer or Observer()
    observer.say(
        f"Starting a bootstrap peer, {options.hosts} hosts with {options.experts} experts "
        f"and {options.trainers} trainers ..."
    )
    every = max(1, min(AVERAGE_EVERY, options.steps // 10))
    swarm = LocalSwarm(
        [grid],
        options.hosts,
        options.trainers,
        train="swarm.demo.trainer:train",
        train_args={
            "steps": options.steps - options.steps % every,
            "seed": options.seed,
            "data": str(options.data.resolve()) if options.data else None,
            "device": options.device,
            "every": every,
            "eval_every": max(1, options.steps // MEASUREMENTS),
        },
        seed=options.seed,
        config={"host": {"device": options.device}},
        bootstrap="process",
        start_timeout_s=START_TIMEOUT_S,
        name="demo",
    )
    with swarm:
        conductor = _Conductor(options, swarm, observer, began)
        result = conductor.conduct()
    result["unigram_loss"] = corpus.unigram_loss
    result["seconds"] = round(time.monotonic() - began, 1)
    result["problems"] = judge(result, faults=options.faults, builtin_text=options.data is None)
    return {"ok": not result["problems"], **result}


def check_device(device: str) -> None:
    """Raise `UsageError` unless this machine has the device (`auto` always works)."""
    import torch

    if device == "auto":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"There is no device {device!r} here: {why}", fix="Use --device cpu or auto.") from error


class _Conductor:
    """The running demo."""

    def __init__(self, options: DemoOptions, swarm: LocalSwarm, observer: Observer, began: float) -> None:
        self._options = options
        self._swarm = swarm
        self._observer = observer
        self._began = began
        self._timeline = timeline(options)
        self._record = DemoRecord(swarm.names("trainer"))
        self._offsets = dict.fromkeys(swarm.names("trainer"), 0)
        self._done: dict[str, list[str]] = {"freeze": [], "kill": [], "restart": [], "thaw": []}
        self._view: SwarmView | None = None
        self._view_at = 0.0
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._returning: str | None = None

    def conduct(self) -> dict[str, Any]:
        """Follow the training until every trainer has ended, then report."""
        self._observer.say("All processes are up; training begins.")
        moved_at, furthest = time.monotonic(), -1
        while True:
            self._read_events()
            self._inject()
            self._look()
            self._show("training")
            now = time.monotonic()
            if self._record.step > furthest:
                moved_at, furthest = now, self._record.step
            states = {name: self._swarm.state(name) for name in self._record.trainers}
            if self._returning is not None and states[self._returning] == "failed":
                self._hold(self._returning, False)
            if all(state in ("done", "left", "failed", "killed") for state in states.values()):
                break
            if now - moved_at > STALL_S:
                raise ProcessError(
                    f"No trainer made a step for {STALL_S:.0f} s. {self._why(states)}",
                    fix="Look at the last log lines above.",
                )
            time.sleep(POLL_S)
        self._read_events()
        self._show("done")
        return self._result()

    def _read_events(self) -> None:
        before = self._record.total("tokens")
        for name in self._record.trainers:
            events, self._offsets[name] = self._swarm.events_since(name, self._offsets[name])
            for event in events:
                self._record.take(name, event)
                if event.get("kind") == "DemoStarted":
                    self._hold(name, False)
                if event.get("kind") == "DemoStarted" and event["synced_from"] and event["step"] > 0:
                    donor = self._name_of(str(event["synced_from"]))
                    self._observer.say(f"{name} downloaded the state from {donor} and goes on at step {event['step']}")
        if self._record.total("tokens") > before:
            self._last_token_at = time.monotonic()
            self._first_token_at = self._first_token_at or self._last_token_at

    def _inject(self) -> None:
        if not self._may_fail_again():
            return
        for fault in self._timeline.due(self._record.step, most=1):
            if fault.action == "restart":
                self._hold(fault.target, True)
                self._swarm.restart(fault.target, wait=False)
            else:
                apply(fault, self._swarm)
                self._record.mark(f"{fault.action} {fault.target}")
            self._done[fault.action].append(fault.target)
            lasting = f" for {fault.seconds:.0f} s" if fault.seconds else ""
            done = {"freeze": "froze", "kill": "killed", "restart": "restarted", "thaw": "thawed"}[fault.action]
            self._observer.say(f"step {self._record.step}: {done} {fault.target}{lasting}")

    def _may_fail_again(self) -> bool:
        """On a fast machine faults would pile up: each one waits until the one before has passed and was measured."""
        frozen = any(self._swarm.state(name) == "frozen" for name in self._done["freeze"])
        return not frozen and self._record.measured_since_fault >= WINDOW_MEASUREMENTS

    def _hold(self, trainer: str, on: bool) -> None:
        """Keep the others from ending while a trainer restarts."""
        self._returning = trainer if on else (None if self._returning == trainer else self._returning)
        file = self._swarm.directory / HOLD_FILE
        if self._returning is None:
            file.unlink(missing_ok=True)
        else:
            file.touch()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._view_at >= VIEW_EVERY_S:
            try:
                self._view = self._swarm.view()
            except (SwarmError, TimeoutError) as error:
                self._observer.say(f"the view could not be refreshed: {error}")
            self._view_at = time.monotonic()

    def _show(self, phase: str) -> None:
        record = self._record
        self._observer.update(
            Snapshot(
                phase=phase,
                step=record.step,
                steps=self._options.steps,
                loss=record.losses[-1][1] if record.losses else None,
                tokens_per_s=self._tokens_per_s(),
                peers=self._peers(),
                min_replicas=self._view.min_replicas(GRID) if self._view else None,
                failed_calls=record.total("failed_calls"),
                masked_fraction=record.masked_fraction,
                elapsed_s=time.monotonic() - self._began,
            )
        )

    def _peers(self) -> str:
        kinds = ("host", "trainer")
        up = {kind: sum(self._swarm.state(n) == "ready" for n in self._swarm.names(kind)) for kind in kinds}
        return ", ".join(f"{up[kind]}/{len(self._swarm.names(kind))} {kind}s" for kind in kinds)

    def _tokens_per_s(self) -> float:
        if self._first_token_at is None or self._last_token_at <= self._first_token_at:
            return 0.0
        return self._record.total("tokens") / (self._last_token_at - self._first_token_at)

    def _name_of(self, peer_id: str) -> str:
        for name in self._swarm.names():
            if self._swarm.peer_id(name) == peer_id:
                return name
        return peer_id[:8]

    def _why(self, states: dict[str, str]) -> str:
        lines = [f"{name} is {state}" for name, state in states.items()]
        for name in states:
            lines += [f"  {name} | {line}" for line in self._swarm.logs(name).splitlines()[-3:]]
        return "\n".join(lines)

    def _result(self) -> dict[str, Any]:
        record, options = self._record, self._options
        survivors = [n for n in record.trainers if self._swarm.state(n) == "done"]
        spreads = record.spreads(survivors)
        failed = [n for n in self._swarm.names() if self._swarm.state(n) == "failed"]
        alive = [n for n in self._swarm.names() if self._swarm.state(n) in ("ready", "frozen", "done")]
        return {
            "steps": record.step,
            "first_loss": record.losses[0][1] if record.losses else None,
            "final_loss": record.losses[-1][1] if record.losses else None,
            "final_loss_experts_masked": record.loss_masked,
            "windows": record.windows(),
            "killed": self._done["kill"],
            "frozen": self._done["freeze"],
            "restarted": self._done["restart"],
            "resumed": {n: t.resumed_at for n, t in record.trainers.items() if t.resumed_at is not None},
            "peers_alive": len(alive),
            "failed_expert_calls": record.total("failed_calls"),
            "masked_fraction": record.masked_fraction,
            "skipped_steps": record.skipped,
            "spread_before_round": spreads[0] if spreads else None,
            "spread_after_round": spreads[1] if spreads else None,
            "tokens": record.total("tokens"),
            "tokens_per_s": round(self._tokens_per_s(), 1),
            "trainers": list(record.trainers),
            "experts": options.experts,
            "min_replicas": self._view.min_replicas(GRID) if self._view else None,
            "failed_processes": failed,
            "losses": record.losses,
        }
