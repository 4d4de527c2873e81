"""A mixture-of-experts layer whose experts live on other peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarm.errors import ConfigError, NonFiniteError, NotEnoughExpertsError, SchemaMismatchError
from swarm.experts.anomalies import AnswerSizes
from swarm.experts.beam import Found
from swarm.experts.capacity import capacity, within_capacity
from swarm.experts.passes import LayerCall, PendingBackward
from swarm.experts.remote import HasExperts, RemoteLayer, SharedStats, autocast_off, autocast_to, check_inputs
from swarm.experts.routing import AuxiliaryLoss, Choice, Dispatch, ProductKeyGate, combine, mixture_weights

NAMED_FAILURES = 4


class MixtureOfExperts(RemoteLayer):
    """Sends every token to the best `k` experts of a grid and mixes their answers.

    The gate is local and trained by your optimizer; the experts are trained by their hosts, during `backward()`. When
    all hosts answer, outputs and gradients equal those of the same experts in this process. When some do not, the
    weights are renormalised over those that did. With `k=1` the weight is the gate's probability of the chosen expert,
    as in Switch Transformers: a softmax over one answer is 1 and would teach the gate nothing.

    Args:
        peer: The peer that takes part in the run.
        grid: Name of the expert grid.
        dim: Width of a token; the experts must take and give `[tokens, dim]`-like rows.
        k: Experts per token.
        k_min: Fewest experts that must answer for every token, of those that it was sent to; with 0 a token without any
            gets zeros.
        capacity_factor: An expert gets at most this times its even share of a batch (tokens * k / live experts), in
            training and evaluation; the tokens that the gate wants there least are dropped, which is no failure: they
            are mixed from their other experts, or are zero without any. None drops nothing.
        jitter: In training, the gate sees its input times random numbers between 1 - `jitter` and 1 + `jitter`. They
            come from torch's default generator, so that activation checkpointing repeats them.
        detect_anomalies: An answer whose largest row is more than this times as large as usual counts as none, and its
            host is avoided for a while. None accepts any size.
        forward_timeout_s: Cap on the forward pass over all replicas; None is adaptive.
        backward_timeout_s: The same for the backward pass.
        balance_weight: Weight of the load-balancing loss in `aux_loss()`.
        z_weight: Weight of the router z-loss in `aux_loss()`.
        codec: How activations and gradients travel: `none`, `bf16`, `fp16`, `int8`.
        grad_scaler: AMP's gradient scaler, if the loss is scaled.

    Attributes:
        gate: The trainable gate.

    Raises:
        UnknownExpertError: The run has no such grid.
        ConfigError: `k`, `k_min` or `dim` do not go with the grid.
    """

    def __init__(
        self,
        peer: HasExperts,
        grid: str,
        dim: int,
        k: int = 2,
        k_min: int = 1,
        forward_timeout_s: float | None = None,
        backward_timeout_s: float | None = None,
        *,
        balance_weight: float = 1e-2,
        z_weight: float = 1e-3,
        codec: str = "none",
        grad_scaler: torch.amp.GradScaler | None = None,
        capacity_factor: float | None = None,
        jitter: float = 0.0,
        detect_anomalies: float | None = None,
    ) -> None:
        super().__init__(peer, f"MixtureOfExperts({grid})", forward_timeout_s, backward_timeout_s, codec, grad_scaler)
        spec = self._client.directory.grid(grid)
        self._profile = self._client.profile(grid)
        if not 1 <= k <= spec.size:
            raise ConfigError(f"k={k} is not between 1 and the {spec.size} experts of {grid!r}.")
        if not 0 <= k_min <= k:
            raise ConfigError(f"k_min={k_min} is not between 0 and k={k}.")
        if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
            raise ConfigError(
                f"capacity_factor={capacity_factor!r} is not a positive number.", fix="Try 1.25, or None."
            )
        if not 0 <= jitter < 1:
            raise ConfigError(f"jitter={jitter!r} is not between 0 and 1.", fix="Try 0.01.")
        inputs, outputs = self._profile.inputs, self._profile.outputs
        if len(inputs) != 1 or not self._profile.single or len(inputs[0].shape) != 2 or len(outputs[0].shape) != 2:
            raise ConfigError(
                f"The experts of {grid!r} do not map [tokens, width] to [tokens, width].",
                fix="Use RemoteExpert for experts of other shapes.",
            )
        if inputs[0].shape[1] not in (None, dim):
            raise ConfigError(f"dim={dim}, but the experts of {grid!r} take {inputs[0]}.", fix="Make them equal.")
        self.grid = grid
        self.dim = dim
        self.k = k
        self.k_min = k_min
        self.balance_weight = balance_weight
        self.z_weight = z_weight
        self.capacity_factor = capacity_factor
        self.jitter = jitter
        self._stats = SharedStats(spec.size)
        self._sizes = None if detect_anomalies is None else AnswerSizes(self._layer, detect_anomalies)
        self.gate = ProductKeyGate(dim, spec.dims or (1,))
        self._uid_at = spec.uid_at
        self._aux = AuxiliaryLoss()
        self._masked = False

    def extra_repr(self) -> str:
        return f"grid={self.grid!r}, dim={self.dim}, k={self.k}, k_min={self.k_min}, codec={self.codec!r}"

    def forward(self, x: Tensor) -> Tensor:
        """Mix the experts' answers for every token.

        Args:
            x: [..., dim] of the dtype that the experts take.

        Returns:
            [..., width of the experts' outputs]

        Raises:
            SchemaMismatchError: `x` has another width or dtype.
            NonFiniteError: `x` holds NaN or infinity; nothing was sent.
            NotEnoughExpertsError: For some token fewer than `k_min` experts answered; says why each failed.
        """
        tokens = self._tokens(x)
        with autocast_off(x):
            if self._masked or tokens.shape[0] == 0:
                # a part of the graph like any other answer, for training loops that meet an empty batch
                return self._result(x, tokens.new_zeros(tokens.shape[0], self._width) + 0.0 * tokens.sum())
            choice, dispatch = self._route(tokens)
            call = self._new_call([self._uid_at(e) for e in dispatch.experts], dispatch.counts)
            (rows,) = self._remote(call, self._profile.outputs, dispatch.sent_tokens, tokens)
            return self._result(x, self._mix(rows, choice, dispatch, call))

    async def forward_async(self, x: Tensor) -> tuple[Tensor, PendingBackward]:
        """`forward` for code that runs on the event loop, where nothing may block.

        Backward then takes two steps: `loss.backward()`, which stops at the experts' outputs, and `await
        pending.backward()`, which calls the hosts and lets the gradients flow on into `x`.
        """
        tokens = self._tokens(x)
        choice, dispatch = await self._route_async(tokens)
        call = self._new_call([self._uid_at(e) for e in dispatch.experts], dispatch.counts)
        (rows,), pending = await self._remote_async(call, self._profile.outputs, dispatch.sent_tokens, tokens)
        return self._result(x, self._mix(rows, choice, dispatch, call)), pending

    def aux_loss(self) -> Tensor:
        """Balance and z losses of all forward passes since the last call; add it to the loss of every step.

        Returns:
            A scalar with gradients for the gate. Under activation checkpointing use `use_reentrant=False`: the
            reentrant form runs the forward pass without gradients, so that there is nothing to return.
        """
        return self._aux.take(self.gate.projection.weight)

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Within this context the layer gives zeros and calls nobody: what is the model without its experts?"""
        before, self._masked = self._masked, True
        try:
            yield
        finally:
            self._masked = before

    @property
    def _width(self) -> int:
        return self._profile.outputs[0].shape[1] or self.dim

    def _tokens(self, x: Tensor) -> Tensor:
        """[..., dim] as [tokens, dim], checked."""
        spec = self._profile.inputs[0]
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise SchemaMismatchError(
                f"{self._layer} got the shape {list(x.shape)}; the last size must be {self.dim}.", fix="Reshape it."
            )
        tokens = autocast_to(x.reshape(-1, self.dim), spec)
        check_inputs(self._layer, [tokens], [spec])
        return tokens

    def _route(self, tokens: Tensor) -> tuple[Choice, Dispatch]:
        if not self._client.directory.is_searched(self.grid):
            live = self._live()
            return self._routed(self.gate(self._jittered(tokens), live, self.k), int(live.sum()))
        logits = self.gate.logits(self._jittered(tokens))
        found = self._client.directory.find(self.grid, logits, self.k)
        if found is None:
            found = self._client.endpoint.run_sync(self._client.directory.search(self.grid, logits, self.k))
        return self._searched(logits, found)

    async def _route_async(self, tokens: Tensor) -> tuple[Choice, Dispatch]:
        if not self._client.directory.is_searched(self.grid):
            return self._route(tokens)
        logits = self.gate.logits(self._jittered(tokens))
        return self._searched(logits, await self._client.directory.search(self.grid, logits, self.k))

    def _searched(self, logits: tuple[Tensor, ...], found: Found) -> tuple[Choice, Dispatch]:
        self._check_enough(found.experts.shape[1])
        choice = self.gate.choice(logits, found.experts, found.live_coordinates)
        # nobody knows how many experts of such a grid are live: those that any token wants are what it has
        return self._routed(choice, len(torch.unique(choice.experts)))

    def _jittered(self, tokens: Tensor) -> Tensor:
        if not (self.jitter and self.training):
            return tokens
        return tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter, 1.0 + self.jitter)

    def _live(self) -> Tensor:
        """Which experts to choose among. [experts] bool"""
        directory = self._client.directory
        live = directory.live(self.grid)
        if int(live.sum()) < max(1, self.k_min):
            live = directory.announced(self.grid)  # better an attempt at a doubtful peer than none
            self._check_enough(int(live.sum()))
        return live

    def _check_enough(self, announced: int) -> None:
        if announced < max(1, self.k_min):
            raise NotEnoughExpertsError(
                f"{self._layer} needs {max(1, self.k_min)} experts; hosts announce {announced} of them.",
                fix="Start hosts (`swarm join`), or wait for them (`peer.wait_for_experts`).",
            )

    def _routed(self, choice: Choice, live: int) -> tuple[Choice, Dispatch]:
        if not bool(torch.isfinite(choice.scores.detach()).all()):
            raise NonFiniteError(
                f"The gate of {self._layer} gives scores that are NaN or infinite.",
                fix="Its weights have diverged: restore a checkpoint and lower the learning rate.",
            )
        if self.training:
            aux = self.balance_weight * self.gate.balance_loss(choice) + self.z_weight * self.gate.z_loss(choice)
            self._aux.add(aux)
        if self.capacity_factor is None:
            return choice, Dispatch.of(choice)
        limit = capacity(self.capacity_factor, choice.experts.shape[0], self.k, live)
        wanted = self.gate.log_probabilities(choice)
        dispatch = Dispatch.of(choice, within_capacity(choice.experts, wanted, limit))
        self._stats.dropped(dispatch.dropped)
        return choice, dispatch

    def _mix(self, rows: Tensor, choice: Choice, dispatch: Dispatch, call: LayerCall) -> Tensor:
        answered = dispatch.answered_slots(call.answered, choice.scores)
        answers = answered.sum(-1)
        needed: int | Tensor = self.k_min
        if dispatch.dropped:
            sent = dispatch.answered_slots([True] * len(call.calls), choice.scores)
            needed = sent.sum(-1).clamp(max=self.k_min)
        short = answers < needed
        if bool(short.any()):
            raise self._not_enough(call, int(short.sum()), int(answers[short].min()))
        if self.k == 1:
            return combine(rows, self.gate.log_probabilities(choice).exp() * answered, dispatch)
        return combine(rows, mixture_weights(choice.scores, answered), dispatch)

    def _not_enough(self, call: LayerCall, tokens: int, fewest: int) -> NotEnoughExpertsError:
        failed = [work for work in call.calls if not work.answered]
        reasons = "; ".join(f"{work.uid} ({work.why()})" for work in failed[:NAMED_FAILURES])
        more = f"; and {len(failed) - NAMED_FAILURES} more" if len(failed) > NAMED_FAILURES else ""
        return NotEnoughExpertsError(
            f"{self._layer}: {len(call.calls) - len(failed)} of {len(call.calls)} experts answered, and {tokens} "
            f"tokens got {fewest} answers where k_min is {self.k_min}. Failed: {reasons or 'none'}{more}.",
            fix="Start more hosts, raise `replicas` or the timeouts, or lower k_min.",
        )

    def _result(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed.reshape(*x.shape[:-1], mixed.shape[-1]).to(x.dtype)
