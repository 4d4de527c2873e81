"""The held replicas and their parts in the agreements: where each has started from, and what it has done since.

Everything but the bookkeeping of names reads or writes weights, and runs on the device's thread; no I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from swarm.experts.agreement import Agreement, AgreementHolder, AgreementId, agree
from swarm.experts.backend import ExpertBackend
from swarm.experts.replicas import OptimizerState, host_state, write_weights
from swarm.identity import PeerId


@dataclass(slots=True, eq=False)
class Held:
    """A replica with its part in the agreements; `made` and `samples` of the optimizer have been noted so far."""

    backend: ExpertBackend
    holder: AgreementHolder
    made: int
    samples: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What a new agreement has meant for a replica: nothing if it was not `newer`."""

    newer: bool
    changed: bool = False
    lost_steps: int = 0


class HeldReplicas:
    """See the module's docstring.

    Args:
        me: This host.
    """

    def __init__(self, me: PeerId) -> None:
        self.me = me.digest
        self._held: dict[str, Held] = {}

    def of(self, backend: ExpertBackend) -> Held:
        """A replica with all steps noted that it has made; one that is not known yet starts from what it is now.

        Initial weights are everywhere the same, and agreed upon. Anything else is an agreement of our own.
        """
        held = self._held.get(backend.uid)
        if held is None or held.backend is not backend:
            version = backend.weight_version
            held = self.begin(
                backend, Agreement(AgreementId(version, self.me if version else b""), host_state(backend), version)
            )
        stepper, made = backend.stepper, backend.stepper.made - held.made
        if made:
            held.holder.made(made, max(made, stepper.samples - held.samples))
            held.made, held.samples = stepper.made, stepper.samples
        return held

    def begin(self, backend: ExpertBackend, base: Agreement) -> Held:
        """A replica goes on from `base`, which its weights are now."""
        stepper = backend.stepper
        held = Held(backend, AgreementHolder(self.me, base), stepper.made, stepper.samples)
        self._held[backend.uid] = held
        return held

    def forget(self, uid: str) -> None:
        self._held.pop(uid, None)

    def gone(self, held: Collection[str]) -> list[str]:
        """Known replicas of experts that are not held any more."""
        return [uid for uid in self._held if uid not in held]

    def agree_alone(self, held: Held) -> None:
        """What a lone holder has done is agreed upon."""
        while held.holder.steps:  # twice if a capture is outstanding
            own = held.holder.capture(host_state(held.backend))
            assert own is not None
            found = agree(held.holder.base, [own], self.me)
            if found is None or held.holder.adopt(found, host_state(held.backend)) is None:
                return

    def adopt(self, backend: ExpertBackend, new: Agreement, optimizer: OptimizerState) -> Moved:
        """Go on from an agreement. Raises as `AgreementHolder.adopt`.

        Weights that stay as they are were made by this replica alone: its optimizer goes on as it is, too.
        """
        held, now = self.of(backend), host_state(backend)
        rebased = held.holder.adopt(new, now)
        if rebased is None:
            return Moved(newer=False)
        changed = any(not torch.equal(now[name], tensor) for name, tensor in rebased.weights.items())
        if changed:
            write_weights(backend, rebased.weights)
            backend.stepper.set_state(optimizer)
        backend.weight_version = max(backend.weight_version, rebased.weight_version)
        return Moved(newer=True, changed=changed, lost_steps=rebased.lost_steps)
