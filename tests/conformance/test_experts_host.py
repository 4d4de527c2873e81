"""Expert hosts over both transports: calls, gradients applied once, bad input, replicas, placement, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import (
    ExpertFailedError,
    HostBusyError,
    MalformedFrameError,
    NonFiniteError,
    NotAuthorizedError,
    SchemaMismatchError,
    StaleRequestError,
    SwarmError,
    UnknownExpertError,
    UnknownRequestError,
    UnsupportedDtypeError,
    WireError,
)
from swarm.experts.happenings import ExpertDropped, ExpertTaken, GradientsLost, HandOverIncomplete
from swarm.experts.host import ExpertHost
from swarm.experts.protocol import CALL, CALL_STREAM, CallRequest, CallResponse, PartRequest, RequestIds
from swarm.experts.registry import build_expert
from swarm.experts.serving import PartFailed
from swarm.experts.spec import ExpertGrid, OptimizerSpec, TensorSpec, expert
from swarm.experts.syncing import ReplicasAgreed, ReplicaSynced
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.state.transfer import SnapshotStore
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import from_frame, to_frame
from tests.support import RUN_ID, GrpcWorld, MemoryWorld, World, eventually

HID = 16


@expert("fragile", inputs=lambda c: [TensorSpec((None, c["hid"]))])
class Fragile(nn.Module):
    """Raises for inputs above a limit; waits on `gate` while it is closed."""

    gate: Callable[[], None] | None = None

    def __init__(self, hid: int = HID) -> None:
        super().__init__()
        self.linear = nn.Linear(hid, hid)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and Fragile.gate is not None:
            Fragile.gate()
        if not x.is_meta and x.max() > 1e3:
            raise RuntimeError("larger than this expert can bear")
        return self.linear(x)


def grid(pattern: str = "ffn.[0:2].[0:2]", module: str = "ffn", replicas: int = 2, **kwargs: Any) -> ExpertGrid:
    config = kwargs.pop("config", {"hid": HID})
    optimizer = kwargs.pop("optimizer", OptimizerSpec("sgd", lr=0.1))
    return ExpertGrid(pattern, module, config=config, replicas=replicas, optimizer=optimizer, **kwargs)


def config(**host: Any) -> PeerConfig:
    """Short intervals; deadlines that a busy machine does not miss."""
    quick = {"announce_ttl_s": 2.0, "replica_sync_s": 0.4, "placement_s": 0.2, "drain_timeout_s": 5.0, "device": "cpu"}
    deadline = {"floor_s": 5.0, "initial_s": 5.0}
    return PeerConfig.preset("local", host={**quick, **host}, deadline=deadline)


class Swarm:
    """A bootstrap peer, hosts of one grid, and a trainer's endpoint with the client's half of the protocol."""

    def __init__(self, world: World, *grids: ExpertGrid) -> None:
        torch.set_num_threads(1)
        self.world = world
        self.grids = {g.name: g for g in grids}
        self.hosts: list[ExpertHost] = []
        self.endpoints: list[Endpoint] = []
        self.ids = RequestIds()

    async def begin(self, hosts: int = 1, **host: Any) -> None:
        self.trainer = await self.world.endpoint(config=config(), roles={Role.TRAINER})
        for _ in range(hosts):
            await self.add_host(**host)

    async def add_host(self, **host: Any) -> ExpertHost:
        endpoint = await self.world.endpoint(config=config(**host), roles={Role.HOST}, bootstrap=[self.trainer.contact])
        result = ExpertHost(endpoint, self.grids, SnapshotStore(endpoint))
        await result.start()
        self.world.at_close(lambda: result.close(drain=False))
        self.endpoints.append(endpoint)
        self.hosts.append(result)
        return result

    def events(self, index: int, kind: type[Any]) -> list[Any]:
        return [s.event for s in self.endpoints[index].runtime.events.recent(kind)]

    async def settled(self, copies: int, *hosts: ExpertHost) -> None:
        """Until each expert is on exactly `copies` of the hosts."""
        uids = [uid for g in self.grids.values() for uid in g.uids()]
        among = hosts or tuple(self.hosts)
        await eventually(lambda: all(sum(u in h.held for h in among) == copies for u in uids), timeout_s=15.0)

    async def send(
        self, to: Contact, request: CallRequest, tensors: list[Tensor], stream: bool = False
    ) -> tuple[CallResponse, list[list[Tensor]]]:
        if stream:
            async with self.trainer.transport.stream(to, CALL_STREAM, timeout_s=10.0) as s:
                await send_tensors(s, self.trainer.runtime, request.to_meta(), tensors)
                await s.finish()
                meta, found = await receive_tensors(s, self.trainer.runtime)
        else:
            meta, found = from_frame(await self.trainer.transport.call(to, CALL, to_frame(request.to_meta(), tensors)))
        response = CallResponse.from_meta(meta)
        response.check_answers(request)
        return response, response.split(found)

    async def one(
        self,
        uid: str,
        direction: Any,
        tensors: list[Tensor],
        request_id: bytes,
        to: int = 0,
        stream: bool = False,
        **part: Any,
    ) -> list[Tensor]:
        """One part; raises its error. `self.last` is the part's response."""
        timeout_s = part.pop("timeout_s", 10.0)
        scale = part.pop("grad_scale", 1.0)
        request = CallRequest(
            direction, (PartRequest(uid, request_id, len(tensors), **part),), timeout_s=timeout_s, grad_scale=scale
        )
        response, found = await self.send(self.endpoints[to].contact, request, tensors, stream)
        self.last = response.parts[0]
        error = self.last.error(str(self.endpoints[to].peer_id))
        if error is not None:
            raise error
        return found[0]


def run(world: World, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    world.run(body)


def local_step(g: ExpertGrid, uid: str, x: Tensor, grad: Tensor, lr: float = 0.1) -> tuple[Tensor, Tensor, nn.Module]:
    """Output, input gradient and module after one SGD step, computed here."""
    module = build_expert(g, uid, RUN_ID)
    leaf = x.clone().requires_grad_()
    out = module(leaf)
    out.backward(grad)
    torch.optim.SGD(module.parameters(), lr=lr).step()
    assert leaf.grad is not None
    return out.detach(), leaf.grad, module


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_call_equals_the_module_in_process_sgd_step_included(world: World, stream: bool) -> None:
    swarm = Swarm(world, grid())

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x, grad, uid = torch.randn(5, HID), torch.randn(5, HID), "ffn.1.0"
        out, grad_in, after = local_step(swarm.grids["ffn"], uid, x, grad)
        request_id = swarm.ids.next()
        [y] = await swarm.one(uid, "forward", [x], request_id, stream=stream)
        torch.testing.assert_close(y, out, rtol=1e-6, atol=1e-6)
        [dx] = await swarm.one(uid, "backward", [grad], request_id, stream=stream, apply=True)
        torch.testing.assert_close(dx, grad_in, rtol=1e-6, atol=1e-6)
        assert (swarm.last.applied, swarm.last.weight_version) == (True, 1)
        [y] = await swarm.one(uid, "forward", [x], swarm.ids.next(), stream=stream)
        torch.testing.assert_close(y, after(x), rtol=1e-6, atol=1e-6)
        assert swarm.hosts[0].held[uid] == 1

    run(world, body)


def test_parts_of_several_experts_travel_in_one_call_and_fail_on_their_own(world: World) -> None:
    swarm = Swarm(world, grid(), grid("fragile.[0:1]", "fragile"))

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x = torch.randn(4, HID)
        sent = [
            ("ffn.0.0", x),
            ("ffn.9.9", x),
            ("fragile.0", x + 1e4),
            ("ffn.0.1", x[:, :3]),
            ("ffn.1.1", x * float("nan")),
            ("fragile.0", x),
        ]
        parts = tuple(PartRequest(uid, swarm.ids.next(), 1) for uid, _ in sent)
        response, found = await swarm.send(
            swarm.endpoints[0].contact, CallRequest("forward", parts), [t for _, t in sent]
        )
        errors = [p.error("host") for p in response.parts]
        kinds = [type(e) for e in errors]
        assert kinds == [
            type(None),
            UnknownExpertError,
            ExpertFailedError,
            SchemaMismatchError,
            NonFiniteError,
            type(None),
        ]
        assert "larger than this expert can bear" in str(errors[2])
        assert [len(f) for f in found] == [1, 0, 0, 0, 0, 1]
        assert {e.uid for e in swarm.events(0, PartFailed)} == {"ffn.9.9", "fragile.0", "ffn.0.1", "ffn.1.1"}

    run(world, body)


def test_a_gradient_is_applied_at_most_once(world: World) -> None:
    swarm = Swarm(world, grid())

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x, grad, request_id = torch.randn(3, HID), torch.randn(3, HID), swarm.ids.next()
        await swarm.one("ffn.0.0", "forward", [x], request_id)
        [first] = await swarm.one("ffn.0.0", "backward", [grad], request_id)
        assert (swarm.last.applied, swarm.last.weight_version) == (False, 0)
        [second] = await swarm.one("ffn.0.0", "backward", [grad], request_id, apply=True)
        torch.testing.assert_close(first, second)
        with pytest.raises(StaleRequestError):
            await swarm.one("ffn.0.0", "backward", [grad], request_id, apply=True)
        with pytest.raises(StaleRequestError):
            await swarm.one("ffn.0.0", "backward", [x, grad], request_id, apply=True, with_inputs=True)
        await swarm.one("ffn.0.0", "backward", [grad], request_id)
        assert swarm.hosts[0].held["ffn.0.0"] == 1

    run(world, body)


def test_backward_without_the_forward_needs_the_inputs(world: World) -> None:
    swarm = Swarm(world, grid())

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x, grad, request_id = torch.randn(3, HID), torch.randn(3, HID), swarm.ids.next()
        with pytest.raises(UnknownRequestError):
            await swarm.one("ffn.0.0", "backward", [grad], request_id, apply=True)
        _, expected, _ = local_step(swarm.grids["ffn"], "ffn.0.0", x, grad)
        [dx] = await swarm.one("ffn.0.0", "backward", [x, grad], request_id, apply=True, with_inputs=True)
        torch.testing.assert_close(dx, expected, rtol=1e-6, atol=1e-6)
        assert swarm.last.applied

    run(world, body)


def test_dropout_is_replayed_and_the_scale_of_a_grad_scaler_is_taken_out(world: World) -> None:
    """The backward pass of a stale graph recomputes the forward pass, with the same dropout."""
    g = grid("block.[0:1]", "transformer", config={"hid": HID, "dropout": 0.5})
    swarm = Swarm(world, g)

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x, grad = torch.randn(2, 3, HID), torch.randn(2, 3, HID)
        request_id = swarm.ids.next()
        [kept] = await swarm.one("block.0", "forward", [x], request_id)
        [again] = await swarm.one("block.0", "forward", [x], request_id)
        assert torch.equal(kept, again)
        [other] = await swarm.one("block.0", "forward", [x], swarm.ids.next())
        assert not torch.equal(kept, other)
        [by_graph] = await swarm.one("block.0", "backward", [grad], request_id)
        [recomputed] = await swarm.one("block.0", "backward", [grad], request_id)
        torch.testing.assert_close(by_graph, recomputed)
        before = {k: v.clone() for k, v in swarm.hosts[0].backend("block.0").module.state_dict().items()}
        [scaled] = await swarm.one("block.0", "backward", [grad * 1024], request_id, apply=True, grad_scale=1024.0)
        torch.testing.assert_close(scaled, by_graph * 1024, rtol=1e-4, atol=1e-3)
        change = (swarm.hosts[0].backend("block.0").module.down.bias - before["down.bias"]).norm()
        assert 0 < change < 0.1 * grad.norm() * 10, "an unscaled step"

    run(world, body)


@pytest.mark.parametrize("bad", ["inputs", "gradients"])
def test_nan_and_infinity_are_refused_and_change_nothing(world: World, bad: str) -> None:
    swarm = Swarm(world, grid())

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x, grad, request_id = torch.randn(3, HID), torch.randn(3, HID), swarm.ids.next()
        before = {k: v.clone() for k, v in swarm.hosts[0].backend("ffn.0.0").module.state_dict().items()}
        (x if bad == "inputs" else grad)[1, 2] = float("inf")
        with pytest.raises(NonFiniteError):
            await swarm.one("ffn.0.0", "backward", [x, grad], request_id, apply=True, with_inputs=True)
        # finite, but the parameters' gradients overflow
        huge = torch.full((3, HID), 3e38)
        x = torch.randn(3, HID)
        with pytest.raises(NonFiniteError):
            await swarm.one("ffn.0.0", "backward", [x, huge], swarm.ids.next(), apply=True, with_inputs=True)
        after = swarm.hosts[0].backend("ffn.0.0").module.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert swarm.hosts[0].held["ffn.0.0"] == 0

    run(world, body)


async def _garbage(swarm: Swarm, frame: bytes) -> SwarmError:
    with pytest.raises(SwarmError) as caught:
        await swarm.trainer.transport.call(swarm.endpoints[0].contact, CALL, frame)
    return caught.value


def test_malformed_calls_get_typed_errors_and_the_host_lives_on(world: World) -> None:
    swarm = Swarm(world, grid())

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x = torch.randn(2, HID)
        good = CallRequest("forward", (PartRequest("ffn.0.0", swarm.ids.next(), 1),)).to_meta()
        part = good["parts"][0]
        assert isinstance(await _garbage(swarm, b"not a frame"), WireError)
        assert isinstance(await _garbage(swarm, to_frame(good, [x])[:-5]), WireError)
        for meta in (
            {**good, "v": 2},
            {**good, "pass": "sideways"},
            {**good, "parts": []},
            {**good, "parts": [{**part, "n": 2}]},
            {**good, "parts": [{**part, "uid": "../etc"}]},
            {**good, "parts": [{**part, "request_id": b"short"}]},
            {**good, "timeout_s": float("nan")},
            {**good, "train": "yes"},
        ):
            assert isinstance(await _garbage(swarm, to_frame(meta, [x])), MalformedFrameError), meta
        assert isinstance(await _garbage(swarm, to_frame({**good, "reply_codec": "zip"}, [x])), UnsupportedDtypeError)
        async with swarm.trainer.transport.stream(swarm.endpoints[0].contact, CALL_STREAM, timeout_s=5.0) as s:
            await s.send(b"\x00" * 64)
            with pytest.raises(WireError):
                await s.receive()
        with pytest.raises(SchemaMismatchError):
            await swarm.one("ffn.0.0", "forward", [x.double()], swarm.ids.next())
        [y] = await swarm.one("ffn.0.0", "forward", [x], swarm.ids.next())
        assert y.shape == (2, HID)

    run(world, body)


def test_a_monitor_may_not_call_experts(world: World) -> None:
    swarm = Swarm(world, grid())

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        swarm.trainer = await world.endpoint(config=config(), roles={Role.MONITOR})
        with pytest.raises(NotAuthorizedError):
            await swarm.one("ffn.0.0", "forward", [torch.randn(2, HID)], swarm.ids.next())

    run(world, body)


def test_a_full_queue_refuses_and_cancelled_work_is_dropped(world: World) -> None:
    """Work piles up while the device is held; what its caller gave up on is never computed."""
    swarm = Swarm(world, grid("fragile.[0:1]", "fragile", replicas=1))

    async def body() -> None:
        await swarm.begin(max_queued_tokens=16)  # half of it is this caller's
        await swarm.settled(1)
        device = swarm.hosts[0]._started()
        opened = _hold(world, device)
        x = torch.randn(4, HID)
        waiting = [asyncio.create_task(swarm.one("fragile.0", "forward", [x], swarm.ids.next())) for _ in range(2)]
        await eventually(lambda: swarm.hosts[0].stats.queued_tokens == 8)
        with pytest.raises(HostBusyError):
            await swarm.one("fragile.0", "forward", [x], swarm.ids.next())
        waiting[0].cancel()
        batcher = device.batcher
        await eventually(lambda: any(w.future.cancelled() for q in batcher._queues.values() for w in q))
        opened()
        await waiting[1]
        stats = swarm.hosts[0].stats.batching
        assert (stats.cancelled, stats.batched, stats.refused) == (1, 1, 1)

    run(world, body)


def test_work_whose_caller_stopped_waiting_is_dropped(world: World) -> None:
    swarm = Swarm(world, grid("fragile.[0:1]", "fragile", replicas=1))

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        opened = _hold(world, swarm.hosts[0]._started())
        call = asyncio.create_task(
            swarm.one("fragile.0", "forward", [torch.randn(4, HID)], swarm.ids.next(), timeout_s=0.05)
        )
        await eventually(lambda: swarm.hosts[0].stats.queued_tokens == 4)
        await asyncio.sleep(0.1)
        opened()
        with pytest.raises(HostBusyError):
            await call
        assert swarm.hosts[0].stats.batching.expired == 1

    run(world, body)


def _hold(world: World, device: Any) -> Callable[[], None]:
    """Keep a host's device busy until the returned function is called."""
    if isinstance(world, MemoryWorld):
        loop_lock: asyncio.Lock = device._device
        asyncio.get_running_loop()
        assert not loop_lock.locked()
        task = asyncio.ensure_future(loop_lock.acquire())
        return lambda: (task.result(), loop_lock.release())[1]
    import threading

    gate = threading.Event()
    task = asyncio.ensure_future(device.call(lambda: gate.wait(20.0)))
    return lambda: (gate.set(), task.done())[0]


def test_requests_that_wait_are_computed_together_and_step_once(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:1]", replicas=1))

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        uid = "ffn.0"
        module = build_expert(swarm.grids["ffn"], uid, RUN_ID)
        xs, grads = [torch.randn(n, HID) for n in (1, 4, 2)], [torch.randn(n, HID) for n in (1, 4, 2)]
        leaves = [x.clone().requires_grad_() for x in xs]
        for leaf, grad in zip(leaves, grads, strict=True):
            module(leaf).backward(grad)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        opened = _hold(world, swarm.hosts[0]._started())
        bad = torch.full((1, HID), float("nan"))
        calls = [
            asyncio.create_task(swarm.one(uid, "backward", [x, g], swarm.ids.next(), apply=True, with_inputs=True))
            for x, g in [*zip(xs, grads, strict=True), (xs[0], bad)]
        ]
        await eventually(lambda: swarm.hosts[0].stats.queued_tokens == 8)
        opened()
        for call, leaf in zip(calls[:3], leaves, strict=True):
            torch.testing.assert_close((await call)[0], leaf.grad, rtol=1e-5, atol=1e-6)
        with pytest.raises(NonFiniteError):
            await calls[3]
        assert swarm.hosts[0].held[uid] == 1
        assert swarm.hosts[0].backend(uid).applied_requests == 3
        found = swarm.hosts[0].backend(uid).module.state_dict()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)

    run(world, body)


def test_hosts_that_start_together_share_the_experts(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:4].[0:2]"))

    async def body() -> None:
        await swarm.begin(hosts=3)
        await swarm.settled(2)

        def balanced() -> bool:
            loads = sorted(len(h.held) for h in swarm.hosts)
            return sum(loads) == 16 and loads[-1] - loads[0] <= 3

        await eventually(balanced, timeout_s=15.0)
        assert all(e.donor == "" or e.weight_version == 0 for i in range(3) for e in swarm.events(i, ExpertTaken))

    run(world, body)


def test_a_secondary_follows_the_replica_that_is_trained(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:1]", optimizer=OptimizerSpec("adamw", lr=1e-2)))

    async def body() -> None:
        await swarm.begin(hosts=2)
        await swarm.settled(2)
        for _ in range(3):
            x = torch.randn(4, HID)
            await swarm.one("ffn.0", "backward", [x, x], swarm.ids.next(), apply=True, with_inputs=True)
        await eventually(lambda: swarm.hosts[1].held["ffn.0"] == 3)
        a, b = (h.backend("ffn.0") for h in swarm.hosts)
        assert all(torch.equal(p, q) for p, q in zip(a.parameters, b.parameters, strict=True))
        assert a.optimizer is not None
        assert b.optimizer is not None
        for p, q in zip(a.parameters, b.parameters, strict=True):
            assert {k: v.tolist() for k, v in a.optimizer.state[p].items()} == {
                k: v.tolist() for k, v in b.optimizer.state[q].items()
            }
        assert swarm.events(1, ReplicaSynced)[-1].lost_steps == 0
        # and the copy trains on as the original would
        for i in (0, 1):
            await swarm.one("ffn.0", "backward", [x, x], swarm.ids.next(), to=i, apply=True, with_inputs=True)
        assert all(torch.equal(p, q) for p, q in zip(a.parameters, b.parameters, strict=True))

    run(world, body)


def test_replicas_that_all_learn_agree_and_a_host_that_leaves_takes_no_step_along(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:1]", replicas=3, optimizer=OptimizerSpec("sgd", lr=0.1)))

    async def body() -> None:
        await swarm.begin(hosts=3)
        await swarm.settled(3)
        backends = [h.backend("ffn.0") for h in swarm.hosts]
        for i, steps in enumerate((3, 1, 2)):
            for _ in range(steps):
                x = torch.randn(4, HID)
                await swarm.one("ffn.0", "backward", [x, x], swarm.ids.next(), to=i, apply=True, with_inputs=True)
        await eventually(lambda: [h.held["ffn.0"] for h in swarm.hosts] == [6, 6, 6], timeout_s=15.0)
        for other in backends[1:]:
            assert all(torch.equal(p, q) for p, q in zip(backends[0].parameters, other.parameters, strict=True))
        agreed = [e for i in range(3) for e in swarm.events(i, ReplicasAgreed)]
        assert sum(e.steps for e in agreed) == 6
        x = torch.randn(4, HID)
        await swarm.one("ffn.0", "backward", [x, x], swarm.ids.next(), to=1, apply=True, with_inputs=True)
        await swarm.hosts[1].close(drain=True)
        assert swarm.events(1, HandOverIncomplete) == []
        assert max(swarm.hosts[i].held["ffn.0"] for i in (0, 2)) == 7

    run(world, body)


def test_a_joining_host_copies_trained_experts_before_it_announces_them(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:2]"))

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x = torch.randn(4, HID)
        await swarm.one("ffn.1", "backward", [x, x], swarm.ids.next(), apply=True, with_inputs=True)
        await swarm.add_host()
        await swarm.settled(2)
        assert swarm.hosts[1].held == {"ffn.0": 0, "ffn.1": 1}
        donor = str(swarm.endpoints[0].peer_id)
        assert {e.donor for e in swarm.events(1, ExpertTaken)} == {donor}

    run(world, body)


def test_a_leaving_host_hands_over(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:4]", replicas=1))

    async def body() -> None:
        await swarm.begin(hosts=2)
        await swarm.settled(1)
        leaver = max(swarm.hosts, key=lambda h: len(h.held))
        index = swarm.hosts.index(leaver)
        x = torch.randn(4, HID)
        for uid in leaver.held:
            await swarm.one(uid, "backward", [x, x], swarm.ids.next(), to=index, apply=True, with_inputs=True)
        trained = leaver.held
        await leaver.close(drain=True)
        await leaver.close(drain=True)
        stayer = swarm.hosts[1 - index]
        assert {uid: stayer.held[uid] for uid in trained} == trained
        assert swarm.events(index, HandOverIncomplete) == []
        await eventually(lambda: len(stayer._view) == 0)

    run(world, body)


def test_gradients_that_were_collected_for_a_step_leave_with_the_expert_or_are_told_as_lost(world: World) -> None:
    collecting = OptimizerSpec("sgd", lr=0.1, accumulate_tokens=100)
    swarm = Swarm(world, grid("ffn.[0:1]", replicas=1, optimizer=collecting))

    async def body() -> None:
        await swarm.begin(hosts=2)
        await swarm.settled(1)
        x = torch.randn(4, HID)
        for last in (False, True):
            leaver = max(swarm.hosts, key=lambda h: len(h.held))
            index = swarm.hosts.index(leaver)
            await swarm.one("ffn.0", "backward", [x, x], swarm.ids.next(), to=index, apply=True, with_inputs=True)
            assert swarm.last.applied
            assert swarm.last.weight_version == (1 if last else 0)
            assert leaver.stats.per_expert["ffn.0"].pending_tokens == 4
            await leaver.close(drain=not last)
            if not last:
                assert swarm.hosts[1 - index].held == {"ffn.0": 1}
            lost = [(e.uid, e.tokens) for e in swarm.events(index, GradientsLost)]
            assert lost == ([("ffn.0", 4)] if last else [])

    run(world, body)


def test_the_use_of_each_expert_is_told(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:2]", replicas=1))

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        x = torch.randn(4, HID)
        for _ in range(3):
            await swarm.one("ffn.0", "backward", [x, x], swarm.ids.next(), apply=True, with_inputs=True)
        use = swarm.hosts[0].stats.per_expert
        assert list(use) == ["ffn.0", "ffn.1"]
        assert (use["ffn.0"].requests, use["ffn.0"].tokens, use["ffn.0"].steps) == (3, 12, 3)
        assert use["ffn.0"].mean_batch == 1.0
        assert use["ffn.0"].compute_s > 0
        assert use["ffn.1"].requests == 0

    run(world, body)


def test_a_host_that_is_not_given_the_time_to_hand_over_stops_all_the_same(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:2]", replicas=1))

    async def body() -> None:
        await swarm.begin(drain_timeout_s=100.0)
        await swarm.settled(1)
        swarm.hosts[0]._look = _blind  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await swarm.hosts[0].close(drain=True)
        assert swarm.hosts[0].held == {}
        with pytest.raises(UnknownExpertError):
            await swarm.one("ffn.0", "forward", [torch.randn(1, HID)], swarm.ids.next())

    run(world, body)


async def _blind() -> bool:
    """Looks for other hosts for ever."""
    await asyncio.sleep(1000.0)
    return False


def test_the_last_host_leaves_at_once_and_says_what_is_lost(world: World) -> None:
    swarm = Swarm(world, grid("ffn.[0:2]"))

    async def body() -> None:
        await swarm.begin(drain_timeout_s=100.0)
        await swarm.settled(1)
        async with asyncio.timeout(10.0):
            await swarm.hosts[0].close(drain=True)
        [event] = swarm.events(0, HandOverIncomplete)
        assert (event.count, event.experts) == (2, ("ffn.0", "ffn.1"))
        assert await swarm.trainer.dht.get("experts/ffn", fresh=True) == []

    run(world, body)


def test_survivors_recreate_what_a_dead_host_held(memory_world: MemoryWorld) -> None:
    """In virtual time only: it takes the lifetime of a record."""
    swarm = Swarm(memory_world, grid("ffn.[0:4].[0:2]"))

    async def body() -> None:
        await swarm.begin(hosts=4)
        await swarm.settled(2)
        x = torch.randn(4, HID)
        for uid in swarm.hosts[0].held:
            await swarm.one(uid, "backward", [x, x], swarm.ids.next(), apply=True, with_inputs=True)
        await asyncio.sleep(2.0)
        dropped = [len(swarm.events(i, ExpertDropped)) for i in (1, 2, 3)]
        lost, at = swarm.hosts[0].held, asyncio.get_running_loop().time()
        await swarm.endpoints[0].transport.close(grace_s=0.0)
        await swarm.hosts[0].close(drain=False)
        survivors = swarm.hosts[1:]
        await swarm.settled(2, *survivors)
        assert asyncio.get_running_loop().time() - at < 10.0
        for uid, version in lost.items():
            assert [h.held[uid] for h in survivors if uid in h.held] == [version, version]
        assert [len(swarm.events(i, ExpertDropped)) for i in (1, 2, 3)] == dropped

    run(memory_world, body)


def test_capacity_is_respected_and_later_hosts_relieve_full_ones(memory_world: MemoryWorld) -> None:
    """In virtual time only: it takes many placement ticks."""
    swarm = Swarm(memory_world, grid("ffn.[0:4].[0:2]", replicas=1))

    async def body() -> None:
        await swarm.begin(max_experts=6)
        await eventually(lambda: len(swarm.hosts[0].held) == 6)
        await asyncio.sleep(2.0)
        assert len(swarm.hosts[0].held) == 6
        await swarm.add_host()
        await swarm.settled(1)
        await asyncio.sleep(5.0)
        await swarm.settled(1)
        assert sorted(len(h.held) for h in swarm.hosts) in ([3, 5], [4, 4])
        dropped = swarm.events(0, ExpertDropped)
        assert len(dropped) == 6 - len(swarm.hosts[0].held)

    run(memory_world, body)


def test_one_batch_at_a_time_and_order_by_seed(memory_world: MemoryWorld) -> None:
    """In virtual time only: the same seed leads to the same events at the same times."""

    def trace() -> list[tuple[float, str]]:
        world = MemoryWorld(seed=7)
        swarm = Swarm(world, grid("ffn.[0:2].[0:2]"))

        async def body() -> None:
            await swarm.begin(hosts=3)
            await swarm.settled(2)

        world.run(body)
        found = [
            (round(s.time_s, 6), repr(s.event)) for e in swarm.endpoints for s in e.runtime.events.recent(ExpertTaken)
        ]
        world.close()
        return found

    assert trace() == trace() != []


def test_real_devices_have_a_thread_that_ends(grpc_world: GrpcWorld) -> None:
    """Over gRPC only: virtual time has no threads."""
    import threading

    swarm = Swarm(grpc_world, grid("ffn.[0:1]"))

    async def body() -> None:
        await swarm.begin()
        await swarm.settled(1)
        thread = swarm.hosts[0]._started()._thread  # type: ignore[attr-defined]
        assert thread.is_alive()
        await swarm.hosts[0].close()
        assert not thread.is_alive()
        assert threading.current_thread() is not thread

    run(grpc_world, body)
