"""A host that answers expert calls as a test tells it to, and an endpoint whose records a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swarm.config import PeerConfig
from swarm.dht.records import Entry
from swarm.endpoint import Endpoint
from swarm.errors import HostBusyError, SwarmError, UnknownExpertError, UnknownRequestError
from swarm.experts.client import ExpertClient
from swarm.experts.protocol import CALL, CALL_STREAM, CallRequest, CallResponse, PartRequest, PartResponse
from swarm.experts.records import HostRecord
from swarm.experts.spec import ExpertGrid, OptimizerSpec, TensorSpec, expert
from swarm.net.loop import loop_thread
from swarm.net.transport import ByteStream, CallContext, Transport
from swarm.roles import ALL_ROLES
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import from_frame, to_frame
from tests.support import RUN_ID, World

DIM = 6
LR = 0.1


@expert("test-tanh", inputs=lambda config: [TensorSpec((None, config["dim"]))])
class Tanh(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


GRID = ExpertGrid("tanh.[0:2].[0:2]", Tanh, config={"dim": DIM}, optimizer=OptimizerSpec("sgd", lr=LR))
GRIDS = {"tanh": GRID}


def local_experts(grid: ExpertGrid = GRID) -> dict[str, nn.Module]:
    """The experts as every fake host starts with them."""
    experts: dict[str, nn.Module] = {}
    for i, uid in enumerate(grid.uids()):
        torch.manual_seed(100 + i)
        experts[uid] = Tanh(grid.config["dim"])
    return experts


@dataclass(eq=False)
class FakeHost:
    """Computes `Tanh` experts and applies SGD, unless the next entry of `script` says otherwise.

    A script entry is consumed per call and pass (`forward:` and `backward:` prefixes select one): `ok`, `busy`, `hang`,
    `slow` (a second), `nan`, `wrong_shape`, `huge`, `forgot`, `unknown`, `apply_then_hang`, `garbage`, or a
    `SwarmError` to raise.
    """

    transport: Transport
    uids: Sequence[str]
    script: dict[str, list[Any]] = field(default_factory=lambda: {"forward": [], "backward": []})
    always: dict[str, Any] = field(default_factory=dict)
    log: list[tuple[str, str, bool, bool]] = field(default_factory=list)
    requests: list[CallRequest] = field(default_factory=list)
    streamed: int = 0
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.experts = local_experts()
        self.cached: dict[tuple[str, bytes], Tensor] = {}
        self.applied: list[tuple[str, bytes]] = []
        self.transport.serve(CALL, self._unary)
        self.transport.serve_stream(CALL_STREAM, self._stream)

    @property
    def record(self) -> HostRecord:
        return HostRecord(self.transport.peer_id, self.transport.contact.addresses, dict.fromkeys(self.uids, 0))

    async def _unary(self, _: CallContext, data: bytes) -> bytes:
        meta, tensors = from_frame(data)
        reply = await self._answer(meta, tensors)
        return reply if isinstance(reply, bytes) else to_frame(reply[0].to_meta(), reply[1])

    async def _stream(self, _: CallContext, stream: ByteStream) -> None:
        self.streamed += 1
        meta, tensors = await receive_tensors(stream, self.transport.runtime)
        reply = await self._answer(meta, tensors)
        if isinstance(reply, bytes):
            await stream.send(reply)
        else:
            await send_tensors(stream, self.transport.runtime, reply[0].to_meta(), reply[1])

    async def _answer(self, meta: dict[str, Any], tensors: list[Tensor]) -> bytes | tuple[CallResponse, list[Tensor]]:
        request = CallRequest.from_meta(meta)
        self.requests.append(request)
        script = self.script[request.direction]
        action = script.pop(0) if script else self.always.get(request.direction, "ok")
        if request.parts[0].uid == "probe":
            action = "hang" if self.always.get("probe") == "hang" else "ok"
        if action == "hang":
            await asyncio.sleep(1e4)
        if action == "slow":
            await asyncio.sleep(1.0)
        if action == "late_garbage":
            await asyncio.sleep(0.3)
        if action in ("garbage", "late_garbage"):
            return b"not a frame"
        if isinstance(action, SwarmError):
            raise action
        results: list[Tensor] = []
        answers: list[PartResponse] = []
        for part, block in zip(request.parts, request.split(tensors), strict=True):
            self.log.append((request.direction, part.uid, part.apply, part.with_inputs))
            try:
                outputs, applied = self._part(request, part, block, action)
            except SwarmError as error:
                answers.append(PartResponse.failed(part, error))
                continue
            if action == "nan":
                outputs = [torch.full_like(o, torch.nan) for o in outputs]
            if action == "huge":
                outputs = [torch.zeros(300_000)]
            if action == "wrong_shape":
                outputs = [o[:, 1:] for o in outputs]
            results += outputs
            answers.append(PartResponse(part.uid, part.request_id, n=len(outputs), applied=applied))
        if action == "apply_then_hang":
            await asyncio.sleep(1e4)
        return CallResponse(tuple(answers)), results

    def _part(
        self, request: CallRequest, part: PartRequest, block: list[Tensor], action: str
    ) -> tuple[list[Tensor], bool]:
        if part.uid not in self.uids or action == "unknown":
            raise UnknownExpertError(f"{part.uid} is not here.")
        if action == "busy":
            raise HostBusyError("The queue is full.")
        module, key = self.experts[part.uid], (part.uid, part.request_id)
        if request.direction == "forward":
            if request.train:
                self.cached[key] = block[0]
            with torch.no_grad():
                return [module(block[0])], False
        if part.with_inputs:
            inputs, (grad,) = block[0], block[1:]
        else:
            if key not in self.cached or action == "forgot":
                raise UnknownRequestError("The inputs are gone.")
            inputs, (grad,) = self.cached.pop(key), block
        x = inputs.clone().requires_grad_()
        grads = torch.autograd.grad(module(x), [x, *module.parameters()], grad)
        if part.apply:
            self.applied.append(key)
            with torch.no_grad():
                for parameter, g in zip(module.parameters(), grads[1:], strict=True):
                    parameter -= LR * g / request.grad_scale
        return [grads[0]], part.apply


class FakeDht:
    """Records as a test writes them, for the directory to read."""

    def __init__(self) -> None:
        self.hosts: list[HostRecord] = []
        self.version = 1
        self.fails: SwarmError | None = None
        self.reads = 0

    async def get_many(self, keys: Iterable[str], *, fresh: bool = False) -> dict[str, list[Entry]]:
        return {key: await self.get(key, fresh=fresh) for key in keys}

    async def get(self, key: str, *, fresh: bool = False) -> list[Entry]:
        self.reads += 1
        assert fresh
        if self.fails is not None:
            raise self.fails
        return [
            Entry(author=h.peer_id, subkey=sub, body=body, record_version=self.version, ttl_s=30.0)
            for h in self.hosts
            for sub, body in h.to_bodies(4096).items()
            if key == "experts/tanh"
        ]


@dataclass(eq=False)
class Stage:
    """A client, its fake records, and fake hosts. `peer` is what layers are made with."""

    world: World
    endpoint: Endpoint
    dht: FakeDht
    experts: ExpertClient
    hosts: list[FakeHost]

    @property
    def events(self) -> Any:
        return self.endpoint.runtime.events

    def primary(self, uid: str) -> FakeHost:
        peer_id = self.experts.directory.replicas(uid)[0].contact.peer_id
        return next(h for h in self.hosts if h.transport.peer_id == peer_id)

    def other(self, host: FakeHost) -> FakeHost:
        return next(h for h in self.hosts if h is not host)


async def set_stage(world: World, holdings: Sequence[Sequence[str]], **client: Any) -> Stage:
    """One host for each list of uids, and a started client that knows them."""
    config = PeerConfig.preset("local", client=client)
    transport = await world.transport(config=config)
    dht = FakeDht()
    endpoint = Endpoint(
        run_id=RUN_ID,
        roles=ALL_ROLES,
        identity=transport.identity,
        config=config,
        runtime=transport.runtime,
        transport=transport,
        dht=dht,  # type: ignore[arg-type]
        loop=None if world.kind == "memory" else loop_thread(),
    )
    hosts = [FakeHost(await world.transport(), list(uids)) for uids in holdings]
    dht.hosts = [h.record for h in hosts]
    experts = ExpertClient(endpoint, GRIDS)
    await experts.start()
    world.at_close(experts.close)
    return Stage(world, endpoint, dht, experts, hosts)
