"""One pass through a chain of remote experts, and the backward pass that belongs to it.

The whole chain runs on the event loop, so that the training thread waits once per pass. The trainer keeps what travels
between the stages: a host that dies is replaced by another replica in either pass, which gets the inputs again.

Micro-batches overlap the stages as in GPipe (Huang et al., 2019). The hosts add up the gradients of a step's
micro-batches and apply them together, so that results and updates are those of the undivided batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import NotEnoughExpertsError
from swarm.experts.calls import GradientMissing, UpdateLost
from swarm.experts.client import ExpertClient
from swarm.experts.passes import LayerCall, RemotePass, on_cpu
from swarm.experts.registry import ExpertProfile
from swarm.experts.remote import (
    SharedStats,
)
from swarm.experts.spec import TensorSpec

IN_FLIGHT = 2
"""Micro-batches that a stage is asked for at once: one computes while the next one travels. More would only wait in the
host's queue, be computed together there, and leave the next stage idle meanwhile."""
CPU = torch.device("cpu")


class ChainCall(RemotePass):
    """One forward pass through all stages, and the backward pass that belongs to it.

    Args:
        client: Makes the calls.
        layer: What errors call the chain.
        lanes: For each micro-batch, the call of every stage.
        profiles: What each stage takes and gives.
        stats: Totals of the whole chain's passes.
        keeps: A backward pass may come: keep what travels between the stages.
        scaler: AMP's gradient scaler, if the loss is scaled.
    """

    def __init__(
        self,
        client: ExpertClient,
        layer: str,
        lanes: Sequence[Sequence[LayerCall]],
        profiles: Sequence[ExpertProfile],
        stats: SharedStats,
        *,
        keeps: bool,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(client, layer, scaler)
        self._lanes = lanes
        self._profiles = profiles
        self._stats = stats
        self._keeps = keeps
        self._sizes = [lane[0].counts[0] for lane in lanes]
        self._clock = client.endpoint.runtime.clock
        # what goes into or comes out of each micro-batch's lane in the pass that runs
        self._ends: list[list[Tensor]] = []
        # for each micro-batch, what every stage but the first got
        self._between: list[list[list[Tensor]]] = []

    # Forward

    def begin(self, rows: Sequence[Tensor]) -> None:
        self._ends = self._split(rows)

    async def forward_async(self) -> None:
        """Raises `NotEnoughExpertsError` when a stage is not answered; the other micro-batches are then given up."""
        started_s = self._clock.time()
        timeout_s = self._lanes[0][0].options.timeout_s
        end_s = None if timeout_s is None else started_s + timeout_s
        gates = [asyncio.Semaphore(IN_FLIGHT) for _ in self._profiles]
        self._between = [[] for _ in self._lanes]
        await _all([self._lane_forward(i, gates, end_s) for i in range(len(self._lanes))])
        self._stats.took("forward", self._clock.time() - started_s)

    async def _lane_forward(self, lane: int, gates: Sequence[asyncio.Semaphore], end_s: float | None) -> None:
        tensors = self._ends[lane]
        for stage, (call, gate) in enumerate(zip(self._lanes[lane], gates, strict=True)):
            async with gate:
                call.begin(tensors)
                self._limit(call, end_s)
                await call.forward_async()
            call.kept()
            work = call.calls[0]
            if not work.answered:
                raise NotEnoughExpertsError(
                    f"{self.layer}: stage {stage} ({work.uid}) did not answer: {work.why()}.",
                    fix="Start more hosts (`swarm join`), raise `replicas` or the timeouts, or retry.",
                )
            if stage and self._keeps:
                self._between[lane].append(tensors)
            tensors = call.outputs(self._profiles[stage].outputs, CPU)
        self._ends[lane] = tensors

    def outputs(self, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
        ends, self._ends = self._ends, []
        return [_joined(parts).to(device) for parts in zip(*ends, strict=True)]

    def kept(self) -> list[Tensor]:
        """The inputs of every stage but the first, micro-batch by micro-batch."""
        between, self._between = self._between, []
        return [t for lane in between for tensors in lane for t in tensors]

    # Backward

    def begin_backward(self, rows: Sequence[Tensor], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
        left = iter(kept)
        for lane, block in zip(self._lanes, self._split(rows), strict=True):
            inputs = block
            for stage, call in enumerate(lane):
                if stage:
                    inputs = [next(left) for _ in self._profiles[stage].inputs]
                call.begin(inputs)
                call.options.grad_scale = self.grad_scale
        self._ends = self._split(grad_outputs)

    async def backward_async(self) -> None:
        started_s = self._clock.time()
        timeout_s = self._lanes[0][0].backward_timeout_s
        end_s = None if timeout_s is None else started_s + timeout_s
        turns = [_Turns([lane[stage] for lane in self._lanes]) for stage in range(len(self._profiles))]
        await _all([self._lane_backward(i, turns, end_s) for i in range(len(self._lanes))])
        self._stats.took("backward", self._clock.time() - started_s)

    async def _lane_backward(self, lane: int, turns: Sequence[_Turns], end_s: float | None) -> None:
        gradients: Sequence[Tensor] | None = self._ends[lane]
        for stage in reversed(range(len(turns))):
            call = self._lanes[lane][stage]
            if gradients is None:
                self._not_reached(call, f"stage {stage + 1} returned no gradient")
            else:
                await turns[stage].wait(lane)
                async with turns[stage].gate:
                    gradients = await self._stage_backward(call, gradients, end_s)
            turns[stage].over(lane)
        inputs = self._lanes[lane][0].calls[0].inputs
        self._ends[lane] = [torch.zeros_like(x) for x in inputs] if gradients is None else list(gradients)
        for call in self._lanes[lane]:
            call.kept()

    async def _stage_backward(
        self, call: LayerCall, gradients: Sequence[Tensor], end_s: float | None
    ) -> list[Tensor] | None:
        """Gradients of a stage's inputs, or none where nobody returned them."""
        work = call.calls[0]
        work.grad_outputs = gradients
        self._limit(call, end_s)
        await call.backward_async()
        inputs, found, work.grad_outputs, work.grad_inputs = work.inputs, work.grad_inputs, (), None
        if found is None:
            return None
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]

    def _not_reached(self, call: LayerCall, reason: str) -> None:
        """A later stage broke the chain: there is no gradient to send, and zeros would move the optimizer."""
        work, options, runtime = call.calls[0], call.options, self.client.endpoint.runtime
        options.stats.missing_gradient()
        runtime.emit(GradientMissing(layer=options.layer, uid=work.uid, tokens=work.tokens, reason=reason))
        if options.train:
            options.stats.lost_update()
            runtime.emit(UpdateLost(layer=options.layer, uid=work.uid, tokens=work.tokens, reason=reason))

    def grad_inputs(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        ends, self._ends = self._ends, []
        joined = [_joined(parts) for parts in zip(*ends, strict=True)]
        return [g.to(x.device) if x.is_floating_point() else None for x, g in zip(rows, joined, strict=True)]

    # Both

    def _split(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Each micro-batch's rows of every tensor, on the CPU."""
        blocks = [torch.split(on_cpu(t), self._sizes) for t in tensors]
        return [[block[i] for block in blocks] for i in range(len(self._sizes))]

    def _limit(self, call: LayerCall, end_s: float | None) -> None:
        """What is left of the pass's time for one stage."""
        call.options.timeout_s = None if end_s is None else max(0.0, end_s - self._clock.time())


class _Turns:
    """Who goes when at one stage's backward pass.

    Micro-batches whose forward pass the same host answered are one step of it: all but the last of them ask it to defer
    the step, and the last waits until the others are over.

    Args:
        calls: The stage's call of every micro-batch.
    """

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        self.gate = asyncio.Semaphore(IN_FLIGHT)
        self._over = [asyncio.Event() for _ in calls]
        self._before: list[list[int]] = [[] for _ in calls]
        groups: dict[Any, list[int]] = {}
        for lane, call in enumerate(calls):
            contact = call.calls[0].contact
            groups.setdefault(None if contact is None else contact.peer_id, []).append(lane)
        for lanes in groups.values():
            self._before[lanes[-1]] = lanes[:-1]
            for lane in lanes:
                calls[lane].calls[0].defer = lane != lanes[-1]

    async def wait(self, lane: int) -> None:
        for other in self._before[lane]:
            await self._over[other].wait()

    def over(self, lane: int) -> None:
        self._over[lane].set()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


async def _all(lanes: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run micro-batches side by side; the first error ends all of them."""
    if len(lanes) == 1:
        await lanes[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for lane in lanes:
                tasks.create_task(lane)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
