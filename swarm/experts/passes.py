"""One pass of a layer over remote experts behind `torch.autograd`, and the backward pass that belongs to it.

The user's thread crosses to the event loop once per pass. Backward functions run wherever autograd runs them: in the
thread that called `backward()` for tensors on the CPU, in a thread of torch's own for other devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import LoopThreadError, NonFiniteError, UsageError
from swarm.experts.calls import CallOptions
from swarm.experts.client import ExpertClient
from swarm.experts.registry import torch_dtype
from swarm.experts.spec import TensorSpec
from swarm.tensors.schema import is_finite


class RemotePass(ABC):
    """What autograd needs of one forward pass over remote experts, and later of its backward pass.

    Args:
        client: Makes the calls.
        layer: What errors call the layer.
        scaler: AMP's gradient scaler, if the loss is scaled.
    """

    def __init__(self, client: ExpertClient, layer: str, scaler: torch.amp.GradScaler | None = None) -> None:
        self.client = client
        self.layer = layer
        self._scaler = scaler

    @abstractmethod
    def begin(self, rows: Sequence[Tensor]) -> None:
        """Take the inputs, each [rows, ...]."""

    @abstractmethod
    async def forward_async(self) -> None:
        """Call the experts."""

    @abstractmethod
    def kept(self) -> list[Tensor]:
        """Hand over what the backward pass needs besides the inputs; the pass itself keeps no tensor from here on."""

    @abstractmethod
    def outputs(self, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
        """The answers in the order of the rows. Each [rows, ...]"""

    @abstractmethod
    def begin_backward(self, rows: Sequence[Tensor], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
        """Take the inputs and what was kept again, and the gradients of the outputs, which are finite."""

    @abstractmethod
    async def backward_async(self) -> None:
        """Call the experts again."""

    @abstractmethod
    def grad_inputs(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs in the order of the rows; None for an input that is not floating-point."""

    @property
    def grad_scale(self) -> float:
        """What the loss is multiplied by."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def overflowed(self, grad_outputs: Sequence[Tensor]) -> bool:
        """Whether a gradient scaler's step is about to be skipped: infinite gradients are then normal.

        Raises:
            NonFiniteError: A gradient is not finite, and no scaler expects that.
        """
        if all(is_finite(g) for g in grad_outputs):
            return False
        if self._scaler is None:
            raise NonFiniteError(
                f"The gradient that reached {self.layer} holds NaN or infinity.",
                fix="Lower the learning rate or clip; with mixed precision, give the layer your grad_scaler.",
            )
        return True


class LayerCall(RemotePass):
    """One forward pass of a layer over its experts, all at once, and later the backward pass that belongs to it.

    Args:
        client: Makes the calls.
        options: How.
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
        super().__init__(client, options.layer, scaler)
        self.options = options
        self.counts = list(counts)
        self.calls = [client.new_call(uid, n, ()) for uid, n in zip(uids, counts, strict=True)]
        for call in self.calls:
            call.sizes = options.sizes
        self.backward_timeout_s = backward_timeout_s

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

    def kept(self) -> list[Tensor]:
        """Nothing: the rows are gathered again from the inputs if the backward pass needs them."""
        for call in self.calls:
            call.inputs = ()
        return []

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

    def begin_backward(self, rows: Sequence[Tensor], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
        """Give every call its rows."""
        self.options.timeout_s = self.backward_timeout_s
        self.options.grad_scale = self.grad_scale
        blocks, gradients = _split(rows, self.counts), _split(grad_outputs, self.counts)
        for call, block, gradient in zip(self.calls, blocks, gradients, strict=True):
            call.inputs, call.grad_outputs = block, gradient

    async def backward_async(self) -> None:
        await self.client.backward([call for call in self.calls if call.answered], self.options)

    def grad_inputs(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs in the order of the rows; zero where nobody answered. Each [rows, ...]"""
        results: list[Tensor | None] = []
        for i, x in enumerate(rows):
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


def on_cpu(tensor: Tensor) -> Tensor:
    """The tensor as it will be sent: on the CPU and dense; a gradient may be one number expanded to a shape."""
    tensor = tensor.detach()
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.to("cpu").contiguous()


def _split(tensors: Sequence[Tensor], counts: list[int]) -> list[tuple[Tensor, ...]]:
    """Each call's rows of every tensor, on the CPU."""
    if len(counts) == 1:
        return [tuple([on_cpu(x) for x in tensors])]
    return list(zip(*(torch.split(on_cpu(x), counts) for x in tensors), strict=True))


def gather(inputs: Sequence[Tensor], rows_of: Tensor | None) -> list[Tensor]:
    """The rows of the work."""
    return list(inputs) if rows_of is None else [x.index_select(0, rows_of) for x in inputs]


def _scatter(inputs: Sequence[Tensor], grads: Sequence[Tensor | None], rows_of: Tensor | None) -> list[Tensor | None]:
    if rows_of is None:
        return list(grads)
    return [
        None if g is None else torch.zeros_like(x).index_add_(0, rows_of, g) for x, g in zip(inputs, grads, strict=True)
    ]


def _spoilt(inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients after an overflow, which the scaler must see to skip its step, and the experts must not."""
    return [torch.full_like(x, torch.nan) if x.is_floating_point() else None for x in inputs]


def forward_now(
    call: RemotePass, specs: Sequence[TensorSpec], rows_of: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The forward pass from the user's thread, to its end; autograd sees nothing of it."""
    call.begin(gather(inputs, rows_of))
    run_on_loop(call.client, call.forward_async())
    return tuple(call.outputs(specs, inputs[0].device))


class RemoteFunction(torch.autograd.Function):
    """`apply(call, specs, rows_of, anchor, *inputs)` -> outputs of all experts, in the order of the rows.

    `anchor` requires a gradient, so that experts are trained also where no input does. `rows_of`, if not None, says
    which row of the inputs each row of the work is: gathering and scattering belong to this function so that only the
    inputs themselves are kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, call: RemotePass, specs: Sequence[TensorSpec], rows_of: Tensor | None, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = forward_now(call, specs, rows_of, inputs)
        ctx.call, ctx.rows_of, ctx.n_inputs = call, rows_of, len(inputs)
        ctx.save_for_backward(*inputs, *call.kept())
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.like = [(o.shape, o.dtype, o.device) for o in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = RemoteFunction._gradients(ctx, grads)
        if torch.is_grad_enabled():  # create_graph=True
            found = [r.requires_grad_() for r in results if r is not None]
            once = iter(_OnlyOnce.apply(ctx.call.layer, *found) if found else ())  # type: ignore[no-untyped-call]
            results = [None if r is None else next(once) for r in results]
        return (None, None, None, None, *results)

    @staticmethod
    def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        call: RemotePass = ctx.call
        saved = ctx.saved_tensors  # checkpointing hands them out once
        inputs, kept = saved[: ctx.n_inputs], saved[ctx.n_inputs :]
        gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        if call.overflowed(gradients):
            return _spoilt(inputs)
        rows = gather(inputs, ctx.rows_of)
        call.begin_backward(rows, kept, gradients)
        run_on_loop(call.client, call.backward_async())
        return _scatter(inputs, call.grad_inputs(rows), ctx.rows_of)


class _OnlyOnce(torch.autograd.Function):
    """`apply(layer, *grads)` -> the same, but differentiating them is an error: hosts return first derivatives only."""

    @staticmethod
    def forward(ctx: Any, layer: str, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise UsageError(
            f"The gradients of {ctx.layer} cannot be differentiated again: its experts are on other machines.",
            fix="Keep second derivatives (gradient penalties, for instance) to the layers in this process.",
        )


class PendingBackward:
    """The second half of a backward pass that was begun on the event loop; see a layer's `forward_async`."""

    def __init__(
        self, call: RemotePass, inputs: Sequence[Tensor], rows_of: Tensor | None, outputs: Sequence[Tensor]
    ) -> None:
        self._call = call
        self._inputs = inputs
        self._rows_of = rows_of
        self._outputs = outputs
        self._kept = call.kept()

    async def backward(self) -> None:
        """Send the gradients of the experts' outputs to the hosts, then go on with those of the inputs.

        Raises:
            UsageError: `loss.backward()` has not been called.
            NonFiniteError: The gradients hold NaN or infinity.
        """
        if all(o.grad is None for o in self._outputs):
            raise UsageError("There is no gradient for the experts' outputs yet.", fix="Call loss.backward() first.")
        gradients = [torch.zeros_like(o) if o.grad is None else o.grad for o in self._outputs]
        inputs = [x.detach() for x in self._inputs]
        if self._call.overflowed(gradients):
            results = _spoilt(inputs)
        else:
            rows = gather(inputs, self._rows_of)
            self._call.begin_backward(rows, self._kept, gradients)
            await self._call.backward_async()
            results = _scatter(inputs, self._call.grad_inputs(rows), self._rows_of)
        pairs = [(x, g) for x, g in zip(self._inputs, results, strict=True) if x.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def run_on_loop(client: ExpertClient, coroutine: Any) -> None:
    """Run to the end on the endpoint's loop. Raises `LoopThreadError` where that loop runs in this thread."""
    if client.endpoint.loop is None:
        coroutine.close()
        raise LoopThreadError(
            "This endpoint lives on a virtual loop, which nothing can wait for.", fix="Use forward_async()."
        )
    client.endpoint.loop.run(coroutine)
