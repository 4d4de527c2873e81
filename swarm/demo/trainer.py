"""What each trainer process of the demo does, and the events by which it tells the orchestrator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import swarm
from swarm.averaging.rounds import Group
from swarm.demo.corpus import WINDOW_BYTES, Corpus
from swarm.demo.model import CONTEXT_BYTES, DIM, ByteModel, K, learning_rate
from swarm.errors import ExpertError
from swarm.events import Event

if TYPE_CHECKING:
    from swarm.peer import Peer

WINDOWS_PER_STEP = 16
TOKENS_PER_STEP = WINDOWS_PER_STEP * WINDOW_BYTES
PEAK_LR = 3e-3
KEPT_ROUNDS = 4
WAIT_FOR_EXPERTS_S = 60.0
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
    """A group averaged the trunk. `file` holds the parameters before and after it. [2, n] float32"""

    step: int
    group: str
    members: tuple[str, ...]
    file: str


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
    torch.manual_seed(seed)
    experts = swarm.MixtureOfExperts(peer, "ffn", dim=DIM, k=K, k_min=0)
    model = ByteModel(experts).to(target)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_LR)
    rounds = _RoundRecorder(peer, model)
    optimizer.register_step_post_hook(rounds.before_round)
    averaging = swarm.ParameterAveraging(every=every, strategy=swarm.AllReduce())
    with swarm.attach(model, optimizer, peer, averaging=averaging) as attachment:
        peer.events.emit(DemoStarted(step=attachment.step, synced_from=str(attachment.synced_from or "")))
        tokens = 0
        if index == 0:
            _measure(peer, model, corpus, attachment.step, target)
        while (step := attachment.step) < steps:
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
            rounds.after_step(attachment)
            tokens += windows.shape[0] * WINDOW_BYTES
            peer.log(loss=float(loss), step=attachment.step)
            peer.events.emit(_progress(attachment.step, tokens, experts))
            if index == 0 and attachment.step % eval_every == 0:
                _measure(peer, model, corpus, attachment.step, target)
        if index == 0:
            _measure(peer, model, corpus, attachment.step, target, masked_too=True)


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

    def __init__(self, peer: Peer, model: nn.Module) -> None:
        self._peer = peer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        assert peer.config.data_dir is not None
        self._directory = peer.config.data_dir / "rounds"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._before: Tensor | None = None
        self._files: list[Path] = []
        self._last_round: Any = None

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._parameters]).cpu()

    def before_round(self, *_: Any) -> None:
        """Registered on the optimizer before the averaging hook, so it runs between the step and the round."""
        self._before = self._flat()

    def after_step(self, attachment: Any) -> None:
        """Record a round if the step that just ended included one."""
        last = attachment.stats.last_round
        if last is None or last is self._last_round or self._before is None:
            return
        self._last_round = last
        if not isinstance(last.outcome, Group):
            return
        file = self._directory / f"{attachment.step:07d}.npy"
        np.save(file, torch.stack([self._before, self._flat()]).numpy())
        self._files.append(file)
        while len(self._files) > KEPT_ROUNDS:
            self._files.pop(0).unlink(missing_ok=True)
        self._peer.events.emit(
            DemoRound(step=attachment.step, group=last.outcome.nonce, members=last.members, file=str(file))
        )
