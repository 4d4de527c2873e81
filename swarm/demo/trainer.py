"""What each trainer process of the demo does, and the events by which it tells the orchestrator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import swarm
from swarm.averaging.rounds import Group, Round
from swarm.demo.corpus import WINDOW_BYTES, Corpus
from swarm.demo.model import CONTEXT_BYTES, DIM, ByteModel, K, learning_rate
from swarm.errors import ExpertError
from swarm.events import Event

if TYPE_CHECKING:
    from swarm.peer import Peer

WINDOWS_PER_STEP = 16
PEAK_LR = 3e-3
KEPT_ROUNDS = 4
WAIT_FOR_EXPERTS_S = 60.0
BEGUN_FILE = "begun"
"""In the directory that the processes share: the first trainer has measured the untrained model."""
HOLD_FILE = "hold"
"""There while a restarted trainer is on its way back: the others wait for it before the last two rounds."""
WAIT_FOR_FIRST_S = 30.0
WAIT_FOR_RESTARTED_S = 30.0
RETRY_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class DemoStarted(Event):
    """Training starts at `step`; above 0 the state came from another trainer, `synced_from`."""

    step: int
    synced_from: str


@dataclass(frozen=True, slots=True)
class DemoProgress(Event):
    """Totals of this trainer since its start: training tokens, calls to experts that failed, (token, expert) pairs."""

    step: int
    tokens: int
    failed_calls: int
    routed: int
    masked: int


@dataclass(frozen=True, slots=True)
class DemoStepSkipped(Event):
    """A training step was given up because too few experts answered."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class DemoHeldOut(Event):
    """Held-out loss in nats per byte; at the end also with zeros in place of the experts' outputs."""

    step: int
    loss: float
    loss_masked: float | None = None


@dataclass(frozen=True, slots=True)
class DemoRound(Event):
    """A group averaged the trunk. `file` holds the parameters before and after it. [2, n] float32

    A round that is not `whole` has left some part out for this peer, because somebody stalled or died in it.
    """

    number: int
    group: str
    members: tuple[str, ...]
    file: str
    whole: bool


def train(peer: Peer, *, steps: int, seed: int, data: str | None, device: str, every: int, eval_every: int) -> None:
    """Train until step `steps`. Called in each trainer process.

    Args:
        every: Steps between averaging rounds of the trunk.
        eval_every: Steps between measurements on the held-out windows, by the first trainer.
    """
    index = int(peer.name.rpartition("-")[2])
    corpus = Corpus.load(Path(data) if data else None, CONTEXT_BYTES)
    target = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    peer.wait_for_experts("ffn", min_fraction=1.0, timeout_s=WAIT_FOR_EXPERTS_S)
    assert peer.config.data_dir is not None
    with swarm.seeded(peer):
        experts = swarm.MixtureOfExperts(peer, "ffn", dim=DIM, k=K, k_min=0)
        model = ByteModel(experts).to(target)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_LR)
    averaging = swarm.ParameterAveraging(every=every, strategy=swarm.AllReduce(), overlap=False)
    rounds = _RoundRecorder(peer, peer.config.data_dir / "rounds")
    with swarm.attach(model, optimizer, peer, averaging, on_round=rounds.on_round) as attachment:
        peer.events.emit(DemoStarted(step=attachment.step, synced_from=str(attachment.synced_from or "")))
        tokens, held = 0, False
        shared = peer.config.data_dir.parents[1]
        begun, hold = shared / BEGUN_FILE, shared / HOLD_FILE
        if index == 0:
            _measure(peer, model, corpus, attachment.step, target)
            begun.touch()
        else:
            _wait_until(begun.exists, WAIT_FOR_FIRST_S)
        while (step := attachment.step) < steps:
            if not held and step >= steps - 2 * every:
                held = True
                _wait_until(lambda: not hold.exists(), WAIT_FOR_RESTARTED_S)
            windows = corpus.batch(WINDOWS_PER_STEP, CONTEXT_BYTES + WINDOW_BYTES, seed, index, step).to(target)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, PEAK_LR)
            try:
                loss = model.loss(windows)
                optimizer.zero_grad()
                (loss + experts.aux_loss()).backward()  # type: ignore[no-untyped-call]
            except ExpertError as error:
                peer.events.emit(DemoStepSkipped(step=step, reason=str(error)))
                time.sleep(RETRY_PAUSE_S)
                continue
            optimizer.step()
            tokens += windows.shape[0] * WINDOW_BYTES
            peer.log(loss=float(loss), step=attachment.step)
            peer.events.emit(_progress(attachment.step, tokens, experts))
            if index == 0 and attachment.step % eval_every == 0:
                _measure(peer, model, corpus, attachment.step, target)
        if index == 0:
            _measure(peer, model, corpus, attachment.step, target, masked_too=True)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _progress(step: int, tokens: int, experts: Any) -> DemoProgress:
    stats = experts.stats
    return DemoProgress(step, tokens, stats.failed_calls, stats.tokens, stats.masked_tokens)


def _measure(
    peer: Peer, model: ByteModel, corpus: Corpus, step: int, device: torch.device, masked_too: bool = False
) -> None:
    windows = corpus.held_out.to(device)
    with _evaluating(model), torch.no_grad():
        try:
            loss = float(model.loss(windows))
        except ExpertError as error:
            peer.events.emit(DemoStepSkipped(step=step, reason=f"held-out loss not measured: {error}"))
            return
        masked = None
        if masked_too:
            with model.experts.masked():
                masked = float(model.loss(windows))
    peer.events.emit(DemoHeldOut(step=step, loss=loss, loss_masked=masked))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


class _RoundRecorder:
    """Leaves each round's parameters, before and after, in a file of its own, and keeps the last few."""

    def __init__(self, peer: Peer, directory: Path) -> None:
        self._peer = peer
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._files: list[Path] = []

    def on_round(self, ended: Round, before: Tensor, after: Tensor) -> None:
        """Given to `attach`."""
        if not isinstance(ended.outcome, Group):
            return
        self._count += 1
        file = self._directory / f"{self._count:06d}-{ended.outcome.nonce[:16]}.npy"
        np.save(file, torch.stack([before, after]).float().cpu().numpy())
        self._files.append(file)
        while len(self._files) > KEPT_ROUNDS:
            self._files.pop(0).unlink(missing_ok=True)
        self._peer.events.emit(
            DemoRound(
                number=self._count,
                group=ended.outcome.nonce,
                members=ended.members,
                file=str(file),
                whole=not ended.degraded,
            )
        )
