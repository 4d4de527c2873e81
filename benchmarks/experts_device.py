"""Experts on a device: what the host's worker makes of it, with queued input and over the network.

Part of `python -m benchmarks.experts --device cuda --json` (any torch device; `cpu` shows that it runs). For `ffn` and
`transformer` of each width:

- `plain_tokens_s`: the module in a loop, inputs on the device: `forward`, or `both` with backward and an SGD step;
- `worker_tokens_s`: the same through batcher, staging copies and device thread, inputs and results on the CPU, with the
  next requests always queued; `worker_ratio` is that over `plain`. Of requests that overlap the host keeps no graph, so
  that `both` includes the forward pass a second time;
- `network_mb_s`: what one remote forward and backward pass moves (inputs, outputs and their gradients) over the time it
  takes; `of_transport` is that over the rate at which the transport echoes tensors in the same run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import swarm
from swarm.experts.backend import BackwardJob, ExpertBackend, ForwardJob
from swarm.experts.batching import Batcher, BatchKey, Work
from swarm.experts.protocol import RequestIds
from swarm.experts.serving import compute, prepare
from swarm.experts.workers import DeviceWorker
from swarm.identity import KeyPair
from swarm.runtime import Runtime

TOKENS = 2048
"""Of one request."""
SEQUENCE = 64
WIDTHS = (1024, 4096)
QUEUED = 4
"""Requests that wait or are computed at any time."""
PASSES, WARM_UP = 30, 5
RUN_ID = bytes(32)


def grid_of(kind: str, width: int) -> swarm.ExpertGrid:
    config = {"hid": width, "seq": SEQUENCE, "heads": width // 64} if kind == "transformer" else {"hid": width}
    optimizer = swarm.OptimizerSpec("sgd", lr=1e-6)
    return swarm.ExpertGrid(f"{kind}{width}", kind, config=config, replicas=1, optimizer=optimizer)


def inputs_of(kind: str, width: int) -> Tensor:
    shape = (TOKENS // SEQUENCE, SEQUENCE, width) if kind == "transformer" else (TOKENS, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain_tokens_s(backend: ExpertBackend, x: Tensor, passes: int) -> tuple[float, float]:
    """The module in a loop, as a researcher would write it: forward, and forward with backward and step."""
    device, module = backend.device, backend.module
    x = x.to(device).requires_grad_()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    gradient = torch.randn_like(x)

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def both() -> None:
        x.grad = None
        module(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    def rate(action: Callable[[], None]) -> float:
        for _ in range(WARM_UP):
            action()
        synchronise(device)
        begun = time.perf_counter()
        for _ in range(passes):
            action()
        synchronise(device)
        return TOKENS * passes / (time.perf_counter() - begun)

    return rate(forward), rate(both)


async def worker_tokens_s(backend: ExpertBackend, x: Tensor, passes: int) -> tuple[float, float]:
    """The same through the host's worker. A backward pass follows its forward pass, as it does for a caller."""
    ahead = prepare if backend.device.type == "cuda" else None
    worker = DeviceWorker(Batcher(4 * TOKENS, 64 * TOKENS), compute, Runtime().clock, prepare=ahead)
    ids, peer, loop = RequestIds(), KeyPair.generate().peer_id, asyncio.get_running_loop()
    gradient = torch.randn(x.shape)

    async def submit(direction: str, job: ForwardJob | BackwardJob, tensors: Sequence[Tensor]) -> Any:
        train = direction == "backward" or job.train  # type: ignore[union-attr]
        key = BatchKey(backend.uid, direction, train, 1.0, tuple(tuple(t.shape[1:]) for t in tensors))
        work = Work(key, TOKENS, float("inf"), (backend, job), loop.create_future(), peer)
        worker.submit(work)
        result = await work.future
        if isinstance(result, swarm.SwarmError):
            raise result
        return result

    async def forward(count: int) -> None:
        for _ in range(count):
            await submit("forward", ForwardJob(ids.next(), [x], train=False), [x])

    async def both(count: int) -> None:
        for _ in range(count):
            request_id = ids.next()
            answer = await submit("forward", ForwardJob(request_id, [x], keep_graph=True), [x])
            job = BackwardJob(peer, request_id, [x], [gradient], apply=True, graph=answer.graph)
            await submit("backward", job, [x, gradient])

    async def rate(caller: Callable[[int], Awaitable[None]]) -> float:
        await asyncio.gather(*(caller(2) for _ in range(QUEUED)))
        each = max(1, passes // QUEUED)
        begun = time.perf_counter()
        await asyncio.gather(*(caller(each) for _ in range(QUEUED)))
        return TOKENS * each * QUEUED / (time.perf_counter() - begun)

    try:
        return await rate(forward), await rate(both)
    finally:
        await worker.close()


def network_mb_s(peer: swarm.Peer, grid: swarm.ExpertGrid, x: Tensor, passes: int) -> float:
    """Bytes that a remote pass moves, both ways, in both directions, by its median time."""
    remote, x = swarm.RemoteExpert(peer, grid.name), x.clone().requires_grad_()
    gradient, times = torch.randn(x.shape), []
    for index in range(passes + WARM_UP):
        begun = time.perf_counter()
        remote(x).backward(gradient)
        if index >= WARM_UP:
            times.append(time.perf_counter() - begun)
    # inputs and outputs, gradients of outputs and of inputs: all of the same size
    return 4 * x.nbytes / statistics.median(times) / 1e6


def measure(device_name: str, config: dict[str, Any], widths: Sequence[int] = WIDTHS, passes: int = PASSES) -> Any:
    """All cases; the host is a process of its own on the same device.

    Args:
        device_name: `cuda`, `cuda:1`, `cpu`.
        config: Of all peers.
    """
    from benchmarks import transport

    device = torch.device(device_name)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    echo_mb_s = transport.run(rounds=5, calls=20)["echo_mb_s"]
    cases = [(kind, width) for kind in ("ffn", "transformer") for width in widths]
    grids = {case: grid_of(*case) for case in cases}
    settings = {**config, "host": {"device": device_name, "max_experts": len(cases)}}
    lines: list[dict[str, Any]] = []
    with (
        swarm.LocalSwarm(experts=list(grids.values()), hosts=1, config=settings) as local,
        local.peer(role="trainer") as peer,
    ):
        for (kind, width), grid in grids.items():
            peer.wait_for_experts(grid.name, timeout_s=120.0)
            x = inputs_of(kind, width)
            backend = ExpertBackend(grid, grid.name, RUN_ID, device)
            plain = plain_tokens_s(backend, x, passes)
            worker = asyncio.run(worker_tokens_s(backend, x, passes))
            ratios: dict[str, float] = {}
            for name, slow, fast in zip(("forward", "both"), worker, plain, strict=True):
                ratios[f"{name}_plain_tokens_s"] = round(fast)
                ratios[f"{name}_worker_tokens_s"] = round(slow)
                ratios[f"{name}_worker_ratio"] = round(slow / fast, 3)
            network = network_mb_s(peer, grid, x, max(3, passes // 3))
            lines.append(
                {
                    "expert": kind,
                    "hid": width,
                    "tokens": TOKENS,
                    **ratios,
                    "network_mb_s": round(network, 1),
                    "of_transport": round(network / echo_mb_s, 3),
                }
            )
    return {"device": card, "transport_echo_mb_s": round(echo_mb_s, 1), "cases": lines}
