"""Experts on CUDA: results as on the CPU, copies through pinned memory beside the compute, autocast, compiling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import swarm.experts.layers  # noqa: F401 - registers the built-ins
from swarm.clock import SystemClock
from swarm.experts.backend import (
    BackwardJob,
    BackwardResult,
    ComputeOptions,
    ExpertBackend,
    ForwardJob,
    ForwardResult,
    KeptGraph,
)
from swarm.experts.batching import Batcher, BatchKey, Work
from swarm.experts.replicas import capture, restore
from swarm.experts.serving import compute, prepare
from swarm.experts.spec import OPTIMIZER_NAMES, ExpertGrid, OptimizerSpec
from swarm.experts.transfers import HostCopies
from swarm.experts.workers import DeviceWorker
from swarm.identity import PeerId

DEVICE, RUN, PEER, HID = torch.device("cuda"), bytes(32), PeerId(bytes(32)), 64
_numbers = iter(range(1, 1 << 30))


def rid() -> bytes:
    return b"noncenon" + next(_numbers).to_bytes(8, "big")


def expert(device: Any = DEVICE, module: str = "ffn", **kwargs: Any) -> ExpertBackend:
    options = kwargs.pop("options", ComputeOptions())
    optimizer = kwargs.pop("optimizer", OptimizerSpec("sgd", lr=0.1))
    return ExpertBackend(ExpertGrid("a", module, config={"hid": HID}, optimizer=optimizer), "a", RUN, device, options)


def forward(b: ExpertBackend, x: Tensor, ahead: bool = False) -> tuple[Tensor, KeptGraph | None]:
    jobs = [ForwardJob(rid(), [x], keep_graph=True)]
    if ahead:
        b.prepare(jobs)
    [result] = b.forward(jobs)
    assert isinstance(result, ForwardResult)
    return result.outputs[0], result.graph


def backward(b: ExpertBackend, x: Tensor, g: Tensor, graph: KeptGraph | None = None, ahead: bool = False) -> Tensor:
    jobs = [BackwardJob(PEER, rid(), [x], [g], True, graph)]
    if ahead:
        b.prepare(jobs)
    [result] = b.backward(jobs)
    assert isinstance(result, BackwardResult)
    return result.grad_inputs[0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_results_and_steps_are_those_of_the_cpu(ahead: bool, kept: bool) -> None:
    cuda, cpu = expert(), expert("cpu")
    for n in (1, 7, 300):
        x, g = torch.randn(n, HID), torch.randn(n, HID)
        (got, graph), (want, _) = forward(cuda, x, ahead), forward(cpu, x)
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        grad = backward(cuda, x, g, graph if kept else None, ahead)
        torch.testing.assert_close(grad, backward(cpu, x, g), rtol=1e-3, atol=1e-3)
    for p, q in zip(cuda.parameters, cpu.parameters, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-3, atol=1e-3)


def test_a_graph_that_went_stale_after_it_was_prepared_is_computed_again() -> None:
    b, other = expert(), expert()
    x, g = torch.randn(5, HID), torch.randn(5, HID)
    _, graph = forward(b, x)
    jobs = [BackwardJob(PEER, rid(), [x], [g], False, graph)]
    b.prepare(jobs)
    for one in (b, other):
        backward(one, x, g)
    [late], [fresh] = b.backward(jobs), other.backward([BackwardJob(PEER, rid(), [x], [g], False)])
    assert isinstance(late, BackwardResult)
    assert isinstance(fresh, BackwardResult)
    torch.testing.assert_close(late.grad_inputs[0], fresh.grad_inputs[0])


def test_copies_are_right_however_busy_the_device_is() -> None:
    copies = HostCopies(DEVICE)
    load = torch.randn(2048, 2048, device=DEVICE)
    sources = [torch.full((1 << 20,), float(n)) for n in range(20)]
    on_their_way = []
    for source in sources:
        load = (load @ load).clamp(-1, 1)
        on_their_way.append(copies.to_device([source, source[:3], source[:0]]))
    back = [copies.to_host(one.wait()) for one in on_their_way]
    for source, (whole, part, nothing) in zip(sources, back, strict=True):
        assert torch.equal(whole, source)
        assert torch.equal(part, source[:3])
        assert nothing.numel() == 0
        assert whole.is_pinned()


def test_copying_to_the_device_does_not_wait_for_its_work() -> None:
    copies, x = HostCopies(DEVICE), torch.randn(1024, 1024)
    copies.to_host(copies.to_device([x]).wait())  # buffers exist from here on
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record(torch.cuda.current_stream())
    arriving = copies.to_device([x])
    assert arriving.arrived is not None
    arriving.arrived.synchronize()
    assert not busy.query(), "the copy has arrived while the device still computes"
    assert torch.equal(copies.to_host(arriving.wait())[0], x)


@pytest.mark.parametrize("name", [n for n in OPTIMIZER_NAMES if n != "muon"])
def test_optimizers_train_and_their_state_moves_between_devices(name: str) -> None:
    spec = OptimizerSpec(name, lr=0.01, schedule="cosine", warmup_steps=2, total_steps=10)
    cuda, cpu = expert(optimizer=spec), expert("cpu", optimizer=spec)
    for _ in range(3):
        backward(cuda, torch.randn(9, HID), torch.randn(9, HID))
    restore(cpu, capture(cuda))
    x, g = torch.randn(9, HID), torch.randn(9, HID)
    for b in (cuda, cpu):
        backward(b, x, g)
    for p, q in zip(cuda.parameters, cpu.parameters, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("module", ["ffn", "transformer"])
def test_autocast_stays_near_full_precision(module: str) -> None:
    exact, fast = expert(module=module), expert(module=module, options=ComputeOptions(autocast="bf16"))
    x = torch.randn(8, 5, HID) if module == "transformer" else torch.randn(64, HID)
    (want, _), (got, graph) = forward(exact, x), forward(fast, x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(backward(fast, x, x, graph), backward(exact, x, x), rtol=5e-2, atol=2e-1)


def test_a_compiled_expert_equals_the_plain_one() -> None:
    plain, compiled = expert(), expert(options=ComputeOptions(compile_backend="inductor"))
    for n in (1, 16, 50):
        x, g = torch.randn(n, HID), torch.randn(n, HID)
        (want, _), (got, graph) = forward(plain, x), forward(compiled, x)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(backward(compiled, x, g, graph), backward(plain, x, g), rtol=1e-2, atol=1e-2)


def test_a_worker_that_prepares_ahead_gives_every_request_its_own_result() -> None:
    b, reference = expert(), expert("cpu")

    async def body() -> Sequence[Any]:
        worker = DeviceWorker(Batcher(256, 1 << 20), compute, SystemClock(), prepare=prepare)
        loop = asyncio.get_running_loop()
        works = []
        for n in range(200):
            job = ForwardJob(rid(), [torch.full((1 + n % 64, HID), float(n % 13))])
            key = BatchKey("a", "forward", True, 1.0, ((HID,),))
            works.append(Work(key, 1 + n % 64, float("inf"), (b, job), loop.create_future()))
            worker.submit(works[-1])
        results = await asyncio.gather(*(w.future for w in works))
        await worker.close()
        return results

    for n, result in enumerate(asyncio.run(body())):
        assert isinstance(result, ForwardResult)
        want, _ = forward(reference, torch.full((1 + n % 64, HID), float(n % 13)))
        torch.testing.assert_close(result.outputs[0], want, rtol=1e-3, atol=1e-3)
