"""Remote experts behind `torch.autograd`: one function for all expert calls of a layer, and a module for one expert.

The user's thread crosses to the event loop once per pass. Backward functions run wherever autograd runs them: in the
thread that called `backward()` for tensors on the CPU, in a thread of torch's own for other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarm.errors import LoopThreadError, NonFiniteError, NotEnoughExpertsError, SchemaMismatchError, UsageError
from swarm.experts.calls import CallOptions, LayerSnapshot, LayerStats
from swarm.experts.client import ExpertClient
from swarm.experts.registry import dtype_name, torch_dtype
from swarm.experts.spec import TensorSpec
from swarm.tensors.codecs import codec as codec_of
from swarm.tensors.schema import is_finite


class HasExperts(Protocol):
    """What a layer needs of a peer."""

    @property
    def experts(self) -> ExpertClient: ...


class ClientHandle:
    """Holds the client for a module: shared by copies of the module, never pickled with it."""

    __slots__ = ("client",)

    def __init__(self, client: ExpertClient) -> None:
        self.client = client

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientHandle:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "A layer of remote experts cannot be pickled: it belongs to this process's peer.",
            fix="Save its state_dict() instead.",
        )


class LayerCall:
    """One forward pass of a layer over its experts, and later the backward pass that belongs to it.

    Args:
        client: Makes the calls.
        options: How. A copy with another `timeout_s` serves the backward pass.
        uids: The experts.
        counts: How many rows of the inputs each of them gets, in order.
        backward_timeout_s: Cap of the backward pass.
        scaler: AMP's gradient scaler, if the loss is scaled.
    """

    def __init__(
        self,
        client: ExpertClient,
        options: CallOptions,
        uids: Sequence[str],
        counts: Sequence[int],
        backward_timeout_s: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.client = client
        self.options = options
        self.counts = list(counts)
        self.calls = [client.new_call(uid, n, ()) for uid, n in zip(uids, counts, strict=True)]
        self._backward_timeout_s = backward_timeout_s
        self._scaler = scaler

    @property
    def answered(self) -> list[bool]:
        return [call.answered for call in self.calls]

    # Forward

    def begin(self, rows: Sequence[Tensor]) -> None:
        """Give every call its rows of the inputs. Each input is [rows, ...]."""
        for call, block in zip(self.calls, _split(rows, self.counts), strict=True):
            call.inputs = block

    async def forward_async(self) -> None:
        await self.client.forward(self.calls, self.options)

    def outputs(self, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
        """The answers in the order of the rows; zero where nobody answered. Each [rows, ...]"""
        results = []
        for i, spec in enumerate(specs):
            blocks = [None if call.outputs is None else call.outputs[i] for call in self.calls]
            rest = next((b.shape[1:] for b in blocks if b is not None), [1 if s is None else s for s in spec.shape[1:]])
            dtype = torch_dtype(spec.dtype)
            full = [
                torch.zeros((n, *rest), dtype=dtype) if b is None else b
                for b, n in zip(blocks, self.counts, strict=True)
            ]
            results.append((full[0] if len(full) == 1 else torch.cat(full)).to(device))
        for call in self.calls:
            if call.outputs is not None:
                call.outputs = []  # the memory is the caller's now
        return results

    # Backward

    def begin_backward(self, inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
        """Give every answered call its rows. Raises `NonFiniteError` when a gradient is not finite."""
        self.options.timeout_s = self._backward_timeout_s
        self.options.grad_scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if not all(is_finite(g) for g in grad_outputs):
            raise NonFiniteError(
                f"The gradient that reached {self.options.layer} holds NaN or infinity.",
                fix="Lower the learning rate or clip; with mixed precision, give the layer your grad_scaler.",
            )
        blocks, gradients = _split(inputs, self.counts), _split(grad_outputs, self.counts)
        for call, block, gradient in zip(self.calls, blocks, gradients, strict=True):
            call.inputs, call.grad_outputs = block, gradient

    async def backward_async(self) -> None:
        await self.client.backward([call for call in self.calls if call.answered], self.options)

    def grad_inputs(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs in the order of the rows; zero where nobody answered. Each [rows, ...]"""
        results: list[Tensor | None] = []
        for i, x in enumerate(inputs):
            if not x.is_floating_point():
                results.append(None)
                continue
            blocks = [None if call.grad_inputs is None else call.grad_inputs[i] for call in self.calls]
            full = [
                torch.zeros((n, *x.shape[1:]), dtype=x.dtype) if b is None else b
                for b, n in zip(blocks, self.counts, strict=True)
            ]
            results.append((full[0] if len(full) == 1 else torch.cat(full)).to(x.device))
        for call in self.calls:
            call.inputs, call.grad_outputs, call.grad_inputs = (), (), None
        return results

    def overflowed(self, grad_outputs: Sequence[Tensor]) -> bool:
        """Whether a gradient scaler's step is about to be skipped: infinite gradients are then normal."""
        return self._scaler is not None and not all(is_finite(g) for g in grad_outputs)


def _on_cpu(tensor: Tensor) -> Tensor:
    # dense, as it will be sent: a gradient may be one number expanded to a shape
    tensor = tensor.detach()
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.to("cpu").contiguous()


def _split(tensors: Sequence[Tensor], counts: list[int]) -> list[tuple[Tensor, ...]]:
    """Each call's rows of every tensor, on the CPU."""
    if len(counts) == 1:
        return [tuple([_on_cpu(x) for x in tensors])]
    return list(zip(*(torch.split(_on_cpu(x), counts) for x in tensors), strict=True))


class RemoteFunction(torch.autograd.Function):
    """`apply(call, specs, n_inputs, rows_of, anchor, *inputs)` -> outputs of all experts, in the order of the rows.

    `anchor` requires a gradient, so that experts are trained also where no input does. `rows_of`, if not None, says
    which row of the inputs each row of the work is: gathering and scattering belong to this function so that only the
    inputs themselves are kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, specs: Sequence[TensorSpec], rows_of: Tensor | None, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        call.begin([x if rows_of is None else x.index_select(0, rows_of) for x in inputs])
        run_on_loop(call.client, call.forward_async())
        for work in call.calls:
            work.inputs = ()  # gathered again from the saved inputs if the backward pass needs them
        outputs = call.outputs(specs, inputs[0].device)
        ctx.call, ctx.rows_of = call, rows_of
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.like = [(o.shape, o.dtype, o.device) for o in outputs]
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        rows_of: Tensor | None = ctx.rows_of
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        if call.overflowed(gradients):
            # The scaler must see the overflow to skip its step; the experts must not.
            spoilt = [torch.full_like(x, torch.nan) if x.is_floating_point() else None for x in inputs]
            return (None, None, None, None, *spoilt)
        work = inputs if rows_of is None else tuple(x.index_select(0, rows_of) for x in inputs)
        call.begin_backward(work, gradients)
        run_on_loop(call.client, call.backward_async())
        results: list[Tensor | None] = []
        for x, grad in zip(inputs, call.grad_inputs(work), strict=True):
            scattered = grad is not None and rows_of is not None
            results.append(torch.zeros_like(x).index_add_(0, rows_of, grad) if scattered else grad)  # type: ignore[arg-type]
        return (None, None, None, None, *results)


def run_on_loop(client: ExpertClient, coroutine: Any) -> None:
    """Run to the end on the endpoint's loop. Raises `LoopThreadError` where that loop runs in this thread."""
    if client.endpoint.loop is None:
        coroutine.close()
        raise LoopThreadError(
            "This endpoint lives on a virtual loop, which nothing can wait for.", fix="Use forward_async()."
        )
    client.endpoint.loop.run(coroutine)


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
        codec_of(codec)
        self._handle = ClientHandle(peer.experts)
        self._layer = layer
        self.forward_timeout_s = forward_timeout_s
        self.backward_timeout_s = backward_timeout_s
        self.codec = codec
        self.grad_scaler = grad_scaler
        self._stats = _SharedStats()
        # not a buffer: it has no value to save, only the flag that makes autograd come back to us
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def stats(self) -> LayerSnapshot:
        """Totals of this layer's calls so far."""
        return self._stats.snapshot()

    @property
    def _client(self) -> ExpertClient:
        return self._handle.client

    def _new_call(self, uids: Sequence[str], counts: Sequence[int]) -> LayerCall:
        train = self.training and torch.is_grad_enabled()
        options = CallOptions(
            self._layer, train=train, timeout_s=self.forward_timeout_s, codec=self.codec, stats=self._stats
        )
        return LayerCall(self._client, options, uids, counts, self.backward_timeout_s, self.grad_scaler)

    def _remote(
        self, call: LayerCall, specs: Sequence[TensorSpec], rows_of: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        anchor = self._anchor if call.options.train else self._anchor.detach()
        results: tuple[Tensor, ...] = RemoteFunction.apply(call, specs, rows_of, anchor, *inputs)  # type: ignore[no-untyped-call]
        return results


class _SharedStats(LayerStats):
    """Totals that copies of a module share: a lock cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedStats:
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
