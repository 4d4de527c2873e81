"""A chain of remote experts as one module: how a network larger than any one machine is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.experts.calls import LayerSnapshot
from swarm.experts.chain import ChainCall
from swarm.experts.passes import PendingBackward
from swarm.experts.remote import (
    HasExperts,
    RemoteExpert,
    RemoteLayer,
    SharedStats,
    autocast_off,
    autocast_to,
    check_inputs,
)
from swarm.experts.spec import TensorSpec


class RemoteSequential(RemoteLayer):
    """A chain of remote experts as a module: the outputs of each are the inputs of the next.

    Results and gradients are those of the same modules in this process. Each stage is trained by its hosts, during
    `backward()`. When a host dies, another replica of its stage goes on; where there is none, the forward pass raises,
    and the backward pass gives zeros for the inputs (counted, with an event) and leaves the stages before it alone.

    Args:
        peer: The peer that takes part in the run.
        experts: The name of a grid of one dimension, for all of its experts in order; or the uids of the stages.
        microbatches: Parts into which a batch is split, so that several stages compute at once. The host of a stage
            takes one optimizer step for all of them. Stages with dropout draw other numbers for another split.
        forward_timeout_s: Cap on the forward pass over all stages and replicas; None is adaptive.
        backward_timeout_s: The same for the backward pass.
        codec: How floating-point tensors travel: `none`, `bf16`, `fp16`, `int8`.
        grad_scaler: AMP's gradient scaler, if the loss is scaled.

    Attributes:
        uids: The stages.

    `len(chain)` is the number of stages, `chain[1:3]` the chain of some of them, `chain[0]` one as a `RemoteExpert`.

    Raises:
        UnknownExpertError: The run has no such grid or expert.
        ConfigError: There is no stage, the grid has several dimensions, or what a stage gives is not what the next one
            takes.
    """

    def __init__(
        self,
        peer: HasExperts,
        experts: str | Sequence[str],
        *,
        microbatches: int = 1,
        forward_timeout_s: float | None = None,
        backward_timeout_s: float | None = None,
        codec: str = "none",
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        directory = peer.experts.directory
        if isinstance(experts, str):
            grid = directory.grid(experts)
            if len(grid.dims) > 1:
                raise ConfigError(
                    f"The experts of {grid.pattern!r} have no order.", fix="List the uids of the stages instead."
                )
            experts = grid.uids()
        if not experts:
            raise ConfigError("A chain needs at least one stage.")
        if type(microbatches) is not int or microbatches < 1:
            raise ConfigError(f"microbatches={microbatches!r} is not a whole number of at least 1.")
        name = f"RemoteSequential({experts[0]}..{experts[-1]})"
        super().__init__(peer, name, forward_timeout_s, backward_timeout_s, codec, grad_scaler)
        self.uids = tuple(experts)
        self.microbatches = microbatches
        self._profiles = [self._client.profile(directory.grid_of(uid).name) for uid in self.uids]
        self._stage_stats = [SharedStats() for _ in self.uids]
        for i, (a, b) in enumerate(zip(self._profiles, self._profiles[1:], strict=False)):
            if len(a.outputs) != len(b.inputs) or not all(map(_fits, a.outputs, b.inputs)):
                raise ConfigError(
                    f"Stage {i} ({self.uids[i]}) gives {_listed(a.outputs)}, but stage {i + 1} ({self.uids[i + 1]}) "
                    f"takes {_listed(b.inputs)}.",
                    fix="Chain experts whose shapes and dtypes go together, or change a grid's config.",
                )

    def extra_repr(self) -> str:
        return f"stages={len(self)}, first={self.uids[0]!r}, last={self.uids[-1]!r}, microbatches={self.microbatches}"

    def forward(self, *inputs: Tensor) -> Any:
        """Call the stages one after the other.

        Args:
            inputs: What the first stage takes.

        Returns:
            A tensor, or a tuple of tensors, as the last stage does.

        Raises:
            SchemaMismatchError, NonFiniteError: The inputs cannot be used.
            NotEnoughExpertsError: No replica of a stage answered; names the stage, and says why.
        """
        call, inputs = self._begin(inputs)
        with autocast_off(inputs[0]):
            outputs = self._remote(call, self._profiles[-1].outputs, None, *inputs)
        return outputs[0] if self._profiles[-1].single else outputs

    async def forward_async(self, *inputs: Tensor) -> tuple[Any, PendingBackward]:
        """`forward` for code that runs on the event loop, where nothing may block.

        Backward then takes two steps: `loss.backward()`, which stops at the last stage's outputs, and `await
        pending.backward()`, which calls the hosts and lets the gradients flow on into the inputs.
        """
        call, inputs = self._begin(inputs)
        outputs, pending = await self._remote_async(call, self._profiles[-1].outputs, None, *inputs)
        return (outputs[0] if self._profiles[-1].single else outputs), pending

    def _begin(self, inputs: tuple[Tensor, ...]) -> tuple[ChainCall, tuple[Tensor, ...]]:
        specs = self._profiles[0].inputs
        if len(inputs) == len(specs):
            inputs = tuple(autocast_to(x, spec) for x, spec in zip(inputs, specs, strict=True))
        check_inputs(self._layer, inputs, specs)
        rows = inputs[0].shape[0]
        parts = max(1, min(self.microbatches, rows))
        sizes = [rows // parts + (i < rows % parts) for i in range(parts)]
        lanes = [
            [self._new_call([uid], [n], stats) for uid, stats in zip(self.uids, self._stage_stats, strict=True)]
            for n in sizes
        ]
        keeps = self._trains or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
        call = ChainCall(
            self._client, self._layer, lanes, self._profiles, self._stats, keeps=keeps, scaler=self.grad_scaler
        )
        return call, inputs

    @property
    def stats(self) -> LayerSnapshot:
        """Totals of all stages; the times are those of a pass through the whole chain."""
        times = self._stats.snapshot()
        return LayerSnapshot.total(self.stage_stats, forward_s=times.forward_s, backward_s=times.backward_s)

    @property
    def stage_stats(self) -> tuple[LayerSnapshot, ...]:
        """Totals of each stage: which one is slow, or lost updates?"""
        return tuple(stats.snapshot() for stats in self._stage_stats)

    def __len__(self) -> int:
        return len(self.uids)

    @overload
    def __getitem__(self, index: int) -> RemoteExpert: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteSequential: ...
    def __getitem__(self, index: int | slice) -> RemoteExpert | RemoteSequential:
        """Some of the stages as a chain of their own, or one of them. Their totals start from zero."""
        if isinstance(index, slice):
            part: RemoteExpert | RemoteSequential = RemoteSequential(
                self._handle,
                self.uids[index],
                microbatches=self.microbatches,
                forward_timeout_s=self.forward_timeout_s,
                backward_timeout_s=self.backward_timeout_s,
                codec=self.codec,
                grad_scaler=self.grad_scaler,
            )
        else:
            part = RemoteExpert(
                self._handle,
                self.uids[index],
                forward_timeout_s=self.forward_timeout_s,
                backward_timeout_s=self.backward_timeout_s,
                codec=self.codec,
                grad_scaler=self.grad_scaler,
            )
        return part.train(self.training)


def _fits(given: TensorSpec, taken: TensorSpec) -> bool:
    """Whether an output can be the next stage's input; sizes that are open on either side show when they are used."""
    return (
        given.dtype == taken.dtype
        and len(given.shape) == len(taken.shape)
        and all(a is None or b is None or a == b for a, b in zip(given.shape, taken.shape, strict=True))
    )


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))
