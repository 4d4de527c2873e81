"""What modules of remote experts have in common, and the module for one expert."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarm.errors import NonFiniteError, NotEnoughExpertsError, SchemaMismatchError, UsageError
from swarm.experts.anomalies import AnswerSizes
from swarm.experts.calls import CallOptions, LayerSnapshot, LayerStats
from swarm.experts.client import ExpertClient
from swarm.experts.passes import LayerCall, PendingBackward, RemoteFunction, RemotePass, forward_now, gather
from swarm.experts.registry import dtype_name, torch_dtype
from swarm.experts.spec import TensorSpec
from swarm.tensors.schema import is_finite

CODECS = ("none", "bf16", "fp16", "int8")
"""How activations and gradients may travel: without error feedback, what is coarser loses too much."""


class HasExperts(Protocol):
    """What a layer needs of a peer."""

    @property
    def experts(self) -> ExpertClient: ...


class ClientHandle:
    """Holds the client for a module: shared by copies of the module, never pickled with it."""

    __slots__ = ("experts",)

    def __init__(self, experts: ExpertClient) -> None:
        self.experts = experts

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientHandle:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "A layer of remote experts cannot be pickled: it belongs to this process's peer.",
            fix="Save its state_dict() instead.",
        )


def check_inputs(layer: str, inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """Refuse what hosts would refuse, before anything is sent.

    Raises:
        SchemaMismatchError: Number, shape or dtype of the inputs are not what the experts take.
        NonFiniteError: An input holds NaN or infinity.
    """
    fits = len(inputs) == len(specs) and all(
        spec.matches(x.shape, dtype_name(x.dtype)) for x, spec in zip(inputs, specs, strict=True)
    )
    if not fits or len({x.shape[0] for x in inputs}) > 1:
        got = ", ".join(f"{dtype_name(x.dtype)}{list(x.shape)}" for x in inputs)
        raise SchemaMismatchError(
            f"{layer} got {got or 'nothing'}, but its experts take {', '.join(map(str, specs))}.",
            fix="Convert the inputs, or change the grid's config.",
        )
    for x in inputs:
        if not is_finite(x):
            raise NonFiniteError(
                f"The activations that reached {layer} hold NaN or infinity; nothing was sent.",
                fix="Look for the cause in the layers before it; lower the learning rate or clip gradients.",
            )


class RemoteLayer(nn.Module):
    """What layers of remote experts have in common: their client, timeouts, codec and totals."""

    def __init__(
        self,
        peer: HasExperts,
        layer: str,
        forward_timeout_s: float | None,
        backward_timeout_s: float | None,
        codec: str,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__()
        for name, value in (("forward_timeout_s", forward_timeout_s), ("backward_timeout_s", backward_timeout_s)):
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value!r} is not a positive number of seconds.", fix="Use None for adaptive.")
        if codec not in CODECS:
            raise UsageError(
                f"Activations and gradients cannot travel as {codec!r}.", fix=f"Use one of {', '.join(CODECS)}."
            )
        self._handle = ClientHandle(peer.experts)
        self._layer = layer
        self.forward_timeout_s = forward_timeout_s
        self.backward_timeout_s = backward_timeout_s
        self.codec = codec
        self.grad_scaler = grad_scaler
        self._stats = SharedStats()
        self._sizes: AnswerSizes | None = None
        # not a buffer: it has no value to save, only the flag that makes autograd come back to us
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def stats(self) -> LayerSnapshot:
        """Totals of this layer's calls so far."""
        return self._stats.snapshot()

    @property
    def _client(self) -> ExpertClient:
        return self._handle.experts

    def _new_call(self, uids: Sequence[str], counts: Sequence[int], stats: LayerStats | None = None) -> LayerCall:
        options = CallOptions(
            self._layer,
            train=self._trains,
            timeout_s=self.forward_timeout_s,
            codec=self.codec,
            stats=self._stats if stats is None else stats,
            sizes=self._sizes,
        )
        return LayerCall(self._client, options, uids, counts, self.backward_timeout_s, self.grad_scaler)

    @property
    def _trains(self) -> bool:
        """Whether a backward pass may come that trains the experts."""
        return self.training and torch.is_grad_enabled()

    def _remote(
        self, call: RemotePass, specs: Sequence[TensorSpec], rows_of: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return forward_now(call, specs, rows_of, inputs)
        anchor = self._anchor if self._trains else self._anchor.detach()
        results: tuple[Tensor, ...] = RemoteFunction.apply(call, specs, rows_of, anchor, *inputs)  # type: ignore[no-untyped-call]
        return results

    async def _remote_async(
        self, call: RemotePass, specs: Sequence[TensorSpec], rows_of: Tensor | None, *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], PendingBackward]:
        """The same on the event loop: outputs that are leaves of the graph, and what goes on from their gradients."""
        with torch.no_grad():
            call.begin(gather(inputs, rows_of))
        await call.forward_async()
        outputs = call.outputs(specs, inputs[0].device)
        for output in outputs:
            output.requires_grad_(torch.is_grad_enabled() and output.is_floating_point())
        return tuple(outputs), PendingBackward(call, inputs, rows_of, outputs)


class SharedStats(LayerStats):
    """Totals that copies of a module share: a lock cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStats:
        return self


class RemoteExpert(RemoteLayer):
    """One remote expert as a module: same arguments, results and gradients as the expert itself.

    Args:
        peer: The peer whose client is used.
        uid: The expert, e.g. `"ffn.0.3"`.
        forward_timeout_s, backward_timeout_s: Caps on one pass, over all replicas; None is adaptive.
        codec: How floating-point tensors travel: `none`, `bf16`, `fp16`, `int8`.
        grad_scaler: AMP's gradient scaler, if the loss is scaled.

    Raises:
        UnknownExpertError: The run has no such expert.
    """

    def __init__(
        self,
        peer: HasExperts,
        uid: str,
        *,
        forward_timeout_s: float | None = None,
        backward_timeout_s: float | None = None,
        codec: str = "none",
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(peer, f"expert {uid}", forward_timeout_s, backward_timeout_s, codec, grad_scaler)
        self.uid = uid
        self._profile = self._client.profile(self._client.directory.grid_of(uid).name)

    def forward(self, *inputs: Tensor) -> Any:
        """Call the expert.

        Returns:
            A tensor, or a tuple of tensors, as the expert does.

        Raises:
            SchemaMismatchError, NonFiniteError: The inputs cannot be used.
            NotEnoughExpertsError: No replica answered; says why.
        """
        if len(inputs) == len(self._profile.inputs):
            inputs = tuple(autocast_to(x, spec) for x, spec in zip(inputs, self._profile.inputs, strict=True))
        with autocast_off(inputs[0] if inputs else self._anchor):
            check_inputs(self._layer, inputs, self._profile.inputs)
            call = self._new_call([self.uid], [inputs[0].shape[0]])
            outputs = self._remote(call, self._profile.outputs, None, *inputs)
        if not call.calls[0].answered:
            raise NotEnoughExpertsError(
                f"{self.uid} did not answer: {call.calls[0].why()}.", fix="Start more hosts (`swarm join`), or retry."
            )
        return outputs[0] if self._profile.single else outputs


def autocast_to(x: Tensor, spec: TensorSpec) -> Tensor:
    """Under autocast, a floating-point input in the dtype that the expert takes; otherwise the input as it is."""
    if x.is_floating_point() and dtype_name(x.dtype) != spec.dtype and torch.is_autocast_enabled(x.device.type):
        return x.to(torch_dtype(spec.dtype))
    return x


def autocast_off(like: Tensor) -> AbstractContextManager[Any]:
    """Autocast must not change dtypes between what is checked and what is sent."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
