"""One expert on one device: module, optimizer, weight version; computes batches of forward and backward work.

Not thread-safe: after construction every method runs on the device worker's thread. Failures of single requests are
values in the results, so that one bad request spoils neither the batch nor the host: a batch that fails as a whole is
computed again one request at a time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from swarm.errors import ExpertFailedError, NonFiniteError, SchemaMismatchError, SwarmError
from swarm.events import Event
from swarm.experts.applied import AppliedIds
from swarm.experts.compiling import CompiledModule, warm_up_shapes
from swarm.experts.limits import GradientLimits
from swarm.experts.optimizing import ExpertOptimizer, Gradient
from swarm.experts.registry import ExpertProfile, build_expert, profile, torch_dtype
from swarm.experts.seeding import PrivateRandomness
from swarm.experts.spec import ExpertGrid
from swarm.experts.transfers import Arriving, HostCopies
from swarm.identity import PeerId
from swarm.tensors.schema import is_finite

KEEP_GRAPH_TOKENS = 1024
"""Requests of so many tokens are not batched in a forward pass."""


def replay_seed(request_id: bytes) -> int:
    """Seed of a request's dropout: a function of its id, so that any host can replay the forward pass."""
    return int.from_bytes(hashlib.sha256(b"swarm/replay\0" + request_id).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How a host computes its experts.

    Attributes:
        autocast: `bf16` runs forward passes under torch's autocast; outputs keep their declared dtype.
        compile_backend: torch.compile's backend; none does not compile.
        gradient_norm_ratio: See `GradientLimits`; none does not limit.
    """

    autocast: Literal["none", "bf16"] = "none"
    compile_backend: str | None = None
    gradient_norm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class CompileFailed(Event):
    """An expert runs without torch.compile from now on."""

    uid: str
    reason: str


@dataclass(slots=True)
class KeptGraph:
    """A forward pass with its autograd graph; valid while the expert's weights are those it was computed with."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    weight_version: int


@dataclass(slots=True)
class ForwardJob:
    """Inputs are on any device, first size = tokens, checked against the specs by the caller."""

    request_id: bytes
    inputs: list[Tensor]
    train: bool = True
    keep_graph: bool = False
    staged: Arriving | None = None


@dataclass(slots=True)
class ForwardResult:
    outputs: list[Tensor]
    graph: KeptGraph | None = None


@dataclass(slots=True)
class BackwardJob:
    """`grad_outputs` has one gradient per output; `graph` is used up if it is still valid.

    `checked` inputs are known to be finite, as a forward pass has used them.

    With `apply` and `defer` the gradient waits for the expert's next step, whoever causes it.
    """

    peer_id: PeerId
    request_id: bytes
    inputs: list[Tensor]
    grad_outputs: list[Tensor]
    apply: bool
    graph: KeptGraph | None = None
    defer: bool = False
    checked: bool = False
    staged: Arriving | None = None
    staged_grads: Arriving | None = None


@dataclass(slots=True)
class BackwardResult:
    """Gradients of the inputs; zero elements where an input has none because it is no floating-point tensor.

    `limit` is what the parameters' gradient was multiplied by because it was unusually large; 1 if it was not.
    """

    grad_inputs: list[Tensor]
    applied: bool
    limit: float = 1.0


def _rows(tensors: Sequence[Tensor]) -> int:
    return tensors[0].shape[0] if tensors else 0


def tokens_of(tensors: Sequence[Tensor]) -> int:
    """The size of a request: the vectors in its first tensor, at least 1."""
    first = tensors[0]
    return max(1, first.numel() // max(1, first.shape[-1]) if first.dim() > 1 else first.numel())


def _check_finite(tensors: Sequence[Tensor], what: str) -> None:
    if not all(map(is_finite, tensors)):
        raise NonFiniteError(f"{what} hold NaN or infinity.", fix="Lower the learning rate, or clip.")


class ExpertBackend:
    """See the module's docstring.

    Args:
        grid: The expert's grid; its class must be registered in this process.
        uid: The expert.
        run_id: Seeds the initial weights together with `uid`.
        device: Where it lives.
        options: How it is computed.

    Attributes:
        stepper: Its optimizer, and how far it has come.
        applied_requests: Requests whose gradients this replica has applied.
        notices: Events of the device's thread, for the event loop to emit.

    Raises:
        ConfigError, UnknownExpertClassError: The class is not installed, or does not accept the config.
    """

    def __init__(
        self,
        grid: ExpertGrid,
        uid: str,
        run_id: bytes,
        device: torch.device | str = "cpu",
        options: ComputeOptions = ComputeOptions(),
    ) -> None:
        self.grid = grid
        self.uid = uid
        self.device = torch.device(device)
        self.profile: ExpertProfile = profile(grid)
        self.module = build_expert(grid, uid, run_id, self.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.stepper = ExpertOptimizer(grid, uid, self.parameters)
        self.applied_requests = 0
        self.notices: deque[Event] = deque(maxlen=64)
        self._options = options
        self._applied = AppliedIds()
        self._copies = HostCopies(self.device)
        self._on_cpu = self.device.type == "cpu"
        self._output_dtypes = [torch_dtype(spec.dtype) for spec in self.profile.outputs]
        ratio = options.gradient_norm_ratio
        self._limits = GradientLimits(ratio) if ratio is not None else None
        self._compiled = CompiledModule(self.module, options.compile_backend) if options.compile_backend else None
        if self._compiled is not None:
            self._warm_up(self._compiled)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer; none for an expert without trainable parameters."""
        return self.stepper.torch

    @property
    def weight_version(self) -> int:
        """Optimizer steps applied since the initial weights, on whichever host."""
        return self.stepper.steps

    @weight_version.setter
    def weight_version(self, steps: int) -> None:
        self.stepper.steps = steps

    def _warm_up(self, compiled: CompiledModule) -> None:
        """Compile now rather than while requests wait."""
        specs = self.profile.inputs
        examples = [
            [
                torch.zeros(s, dtype=torch_dtype(spec.dtype), device=self.device)
                for s, spec in zip(shapes, specs, strict=True)
            ]
            for shapes in zip(*(warm_up_shapes(spec.shape) for spec in specs), strict=True)
        ]
        with self._autocast():
            compiled.warm_up(examples)
        self._report_compiler()

    def _report_compiler(self) -> None:
        if self._compiled is not None and self._compiled.failure:
            self.notices.append(CompileFailed(self.uid, self._compiled.failure))
            self._compiled = None

    def prepare(self, jobs: Sequence[ForwardJob] | Sequence[BackwardJob]) -> None:
        """Begin to copy what jobs need to the device, while it computes something else. From any thread."""
        for job in jobs:
            if isinstance(job, BackwardJob):
                job.staged_grads = self._copies.to_device(job.grad_outputs)
                if job.graph is not None:
                    job.staged = Arriving([x.detach() for x in job.graph.leaves])
                    continue
            job.staged = self._copies.to_device(job.inputs)

    # ---- forward

    def forward(self, jobs: Sequence[ForwardJob]) -> list[ForwardResult | SwarmError]:
        """Compute jobs of equal `train` and equal trailing sizes as one batch. Results are on the CPU.

        Training jobs that are large enough to fill a device are computed one by one, so that each keeps its graph: to
        batch them would save less than computing them again in the backward pass costs.
        """
        large = all(j.keep_graph and tokens_of(j.inputs) >= KEEP_GRAPH_TOKENS for j in jobs)
        one_by_one = len(jobs) > 1 and jobs[0].train and (self.profile.random or large)
        if len(jobs) > 1 and not one_by_one:
            try:
                return list(self._forward(jobs))
            except SwarmError:
                pass  # found out below whose fault it is
        results: list[ForwardResult | SwarmError] = []
        for job in jobs:
            try:
                results += self._forward([job])
            except SwarmError as error:
                results.append(error)
        return results

    def _forward(self, jobs: Sequence[ForwardJob]) -> list[ForwardResult]:
        inputs = self._inputs(jobs)
        _check_finite(inputs, "The inputs")
        keep = len(jobs) == 1 and jobs[0].keep_graph
        if keep:
            leaves, outputs = self._run(inputs, jobs[0].request_id)
        else:
            with torch.no_grad():
                outputs = self._call(inputs, jobs[0].train, jobs[0].request_id)
        _check_finite(outputs, f"The outputs of {self.uid}")
        cpu = self._copies.to_host(outputs)
        if keep:
            return [ForwardResult(cpu, KeptGraph(leaves, outputs, self.weight_version))]
        return [ForwardResult(part) for part in self._parts(cpu, [_rows(j.inputs) for j in jobs])]

    def _run(self, inputs: Sequence[Tensor], request_id: bytes) -> tuple[list[Tensor], list[Tensor]]:
        """Training forward with a graph: the leaves whose gradients are wanted, and the outputs."""
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        return leaves, self._call(leaves, True, request_id)

    def _call(self, inputs: Sequence[Tensor], train: bool, request_id: bytes) -> list[Tensor]:
        """Run the expert's own code; whatever it raises becomes an `ExpertFailedError`."""
        if self.module.training != train:
            self.module.train(train)
        random: PrivateRandomness | None = None
        if train and self.profile.random:
            random = PrivateRandomness(replay_seed(request_id))
            run: Callable[..., object] = self.module
        else:
            run = self._compiled or self.module
        try:
            if random is None and self._options.autocast == "none":
                result = run(*inputs)
            else:
                with random or nullcontext(), self._autocast():
                    result = run(*inputs)
        except Exception as error:
            raise ExpertFailedError(f"{self.uid} raised {type(error).__name__}: {str(error)[:300]}") from error
        self._report_compiler()
        outputs = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else []
        if len(outputs) != len(self.profile.outputs) or any(o.shape[:1] != inputs[0].shape[:1] for o in outputs):
            raise ExpertFailedError(f"{self.uid} returned other outputs than its class declares.")
        return [o if o.dtype == d else o.to(d) for o, d in zip(outputs, self._output_dtypes, strict=True)]

    def _autocast(self) -> AbstractContextManager[object]:
        if self._options.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _inputs(self, jobs: Sequence[ForwardJob] | Sequence[BackwardJob]) -> list[Tensor]:
        return self._joined([j.inputs for j in jobs], [j.staged for j in jobs])

    def _joined(self, groups: Sequence[Sequence[Tensor]], staged: Sequence[Arriving | None]) -> list[Tensor]:
        """One batch on the expert's device; a lone request is not copied."""
        try:
            if staged[0] is not None and all(s is not None for s in staged):
                here = [s.wait() for s in staged if s is not None]
                return here[0] if len(here) == 1 else [torch.cat(t) for t in zip(*here, strict=True)]
            together = groups[0] if len(groups) == 1 else [torch.cat(t) for t in zip(*groups, strict=True)]
        except RuntimeError as error:
            raise SchemaMismatchError(f"The tensors for {self.uid} do not fit together: {str(error)[:200]}") from error
        if self._on_cpu and all(t.is_cpu for t in together):
            return list(together)
        return self._copies.to_device(together).wait()

    @staticmethod
    def _parts(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[list[Tensor]]:
        if len(rows) == 1:
            return [list(tensors)]
        return [list(part) for part in zip(*(torch.split(t, list(rows)) for t in tensors), strict=True)]

    # ---- backward

    def backward(self, jobs: Sequence[BackwardJob], grad_scale: float = 1.0) -> list[BackwardResult | SwarmError]:
        """Gradients of the inputs of all jobs; those of the parameters, summed over jobs with `apply`, as one step.

        Args:
            jobs: Of equal trailing sizes.
            grad_scale: What the loss was multiplied by; parameter gradients are divided by it.
        """
        refusals = [self._refusal(job) for job in jobs]
        results: list[BackwardResult | SwarmError | None] = list(refusals)
        gradient = Gradient([None] * len(self.parameters))
        summed: list[int] = []
        for group in self._groups(jobs, [i for i, error in enumerate(refusals) if error is None]):
            grads, part = self._isolated([jobs[i] for i in group], grad_scale)
            for i, grad in zip(group, grads, strict=True):
                results[i] = grad if isinstance(grad, SwarmError) else BackwardResult(grad, applied=False)
            went_well = [r for r in (results[i] for i in group) if isinstance(r, BackwardResult)]
            if jobs[group[0]].apply and went_well:
                good = [i for i in group if isinstance(results[i], BackwardResult)]
                part, limit = self._limited(part, [jobs[i] for i in good])
                for one in went_well:
                    one.limit = limit
                gradient = gradient.plus(part)
                summed += good
        if summed:
            error = self._take_over(gradient, [jobs[i] for i in summed])
            for i in summed:
                result = results[i]
                assert isinstance(result, BackwardResult)
                result.applied = True
                results[i] = error or result
            self.applied_requests += 0 if error else len(summed)
        return [r for r in results if r is not None]

    def flush(self) -> bool:
        """Make a step of the gradients collected so far, if there are any. Raises `SwarmError`; they are lost then."""
        return self.stepper.flush()

    def _limited(self, gradient: Gradient, jobs: Sequence[BackwardJob]) -> tuple[Gradient, float]:
        """The gradient that jobs of one trainer have led to, and what it was multiplied by to keep it within limits."""
        if self._limits is None:
            return gradient, 1.0
        tokens = sum(tokens_of(j.inputs) for j in jobs)
        limit = self._limits.factor(jobs[0].peer_id, tokens, gradient.check(self.uid))
        return (gradient, 1.0) if limit == 1.0 else (gradient.over(1.0 / limit), limit)

    def _take_over(self, gradient: Gradient, jobs: Sequence[BackwardJob]) -> SwarmError | None:
        """Give the optimizer a gradient that it owes to these jobs. Returns why it could not be applied, if so."""
        try:
            self.stepper.add(gradient, sum(tokens_of(j.inputs) for j in jobs), sum(not j.defer for j in jobs))
        except SwarmError as error:
            return error
        return None

    def _refusal(self, job: BackwardJob) -> SwarmError | None:
        try:
            _check_finite(job.grad_outputs, "The gradients")
            if not job.checked:
                _check_finite(job.inputs, "The inputs")
            if job.apply:
                self._applied.claim(job.peer_id, job.request_id)
        except SwarmError as error:
            return error
        return None

    def _groups(self, jobs: Sequence[BackwardJob], indices: Sequence[int]) -> list[list[int]]:
        """Jobs to differentiate together: alone where a graph is kept or dropout is replayed, else by `apply`.

        Gradients that are limited are those of one trainer each.
        """
        alone: list[list[int]] = []
        together: dict[tuple[bool, PeerId | None], list[int]] = {}
        for i in indices:
            if self.profile.random or self._valid_graph(jobs[i]) is not None:
                alone.append([i])
            else:
                trainer = jobs[i].peer_id if jobs[i].apply and self._limits is not None else None
                together.setdefault((jobs[i].apply, trainer), []).append(i)
        return alone + list(together.values())

    def _valid_graph(self, job: BackwardJob) -> KeptGraph | None:
        return job.graph if job.graph is not None and job.graph.weight_version == self.weight_version else None

    def _isolated(
        self, jobs: Sequence[BackwardJob], grad_scale: float
    ) -> tuple[list[list[Tensor] | SwarmError], Gradient]:
        """Input gradients or an error for each job, and the parameter gradient of those that went well."""
        try:
            grads, gradient = self._differentiate(jobs, grad_scale)
            return list(grads), gradient
        except SwarmError as error:
            if len(jobs) == 1:
                return [error], Gradient([None] * len(self.parameters))
        results: list[list[Tensor] | SwarmError] = []
        total = Gradient([None] * len(self.parameters))
        for job in jobs:
            one, gradient = self._isolated([job], grad_scale)
            results += one
            total = total.plus(gradient)
        return results, total

    def _differentiate(self, jobs: Sequence[BackwardJob], grad_scale: float) -> tuple[list[list[Tensor]], Gradient]:
        grad_outputs = self._joined([j.grad_outputs for j in jobs], [j.staged_grads for j in jobs])
        graph = self._valid_graph(jobs[0]) if len(jobs) == 1 else None
        if graph is not None:
            leaves, outputs = graph.leaves, graph.outputs
        else:
            leaves, outputs = self._run(self._inputs(jobs), jobs[0].request_id)
        if [o.shape for o in outputs] != [g.shape for g in grad_outputs]:
            raise SchemaMismatchError("The gradients have other shapes than the outputs of the expert.")
        pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if o.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        wrt = [*wanted, *(self.parameters if jobs[0].apply else ())]
        found: list[Tensor | None] = [None] * len(wrt)
        if pairs and wrt:
            try:
                found = list(torch.autograd.grad([o for o, _ in pairs], wrt, [g for _, g in pairs], allow_unused=True))
            except Exception as error:
                if self._compiled is not None:
                    # compiled backward passes are made when they are needed first; without them it may go well
                    self._compiled.give_up(error)
                    self._report_compiler()
                    for job in jobs:
                        job.graph = None
                    return self._differentiate(jobs, grad_scale)
                text = f"The backward pass of {self.uid} raised {type(error).__name__}: {str(error)[:300]}"
                raise ExpertFailedError(text) from error
        by_leaf = dict(zip(map(id, wanted), found, strict=False))
        grads = [_grad_or_zero(x, by_leaf.get(id(x))) for x in leaves]
        _check_finite(grads, f"The input gradients of {self.uid}")
        gradient = Gradient(found[len(wanted) :] if jobs[0].apply else [None] * len(self.parameters)).over(grad_scale)
        gradient.check(self.uid)
        return self._parts(self._copies.to_host(grads), [_rows(j.inputs) for j in jobs]), gradient


def _grad_or_zero(leaf: Tensor, grad: Tensor | None) -> Tensor:
    if not leaf.requires_grad:
        return torch.empty(0)
    return torch.zeros_like(leaf) if grad is None else grad
