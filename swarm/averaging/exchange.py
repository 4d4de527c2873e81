"""The butterfly exchange of one sealed group: one stream per (sender, reducer), values up, encoded averages down.

Each member is the reducer of its own part (`PartServer`) and a sender to every other reducer (`PartClient`). When all
its parts are settled it tells the others a hash of what it holds, so that all know who diverged.

Memory: the encoded averages of this member's part, and a window of `WINDOW_CHUNKS` chunks for each sender.
"""

from __future__ import annotations

import asyncio

from swarm.averaging.agreement import judge
from swarm.averaging.bandwidth import Bandwidths
from swarm.averaging.checking import CheckClient, CheckServer, settle_verified
from swarm.averaging.reducing import PartServer
from swarm.averaging.robust import Reducer
from swarm.averaging.rounds import RoundReport, Seal
from swarm.averaging.sending import PartClient
from swarm.averaging.shared import EXCHANGE, OnOffender, Part, Shared
from swarm.averaging.vector import FlatVector
from swarm.config import AveragingConfig
from swarm.errors import NoGroupError
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, Transport
from swarm.pb.averaging_pb2 import ExchangeHello
from swarm.runtime import Runtime
from swarm.tensors.feedback import ErrorFeedback

__all__ = ["EXCHANGE", "Exchange"]


class Exchange:
    """This member's side of one exchange. `run` it once; hand it incoming streams by `serve`.

    Args:
        vector: Local values; holds averages (or local values, where something was lost) after `run`.
        weight: Of these values in the mean; the seal's is provisional.
        report: Collects bytes and degradations.
        feedback: What lossy codecs left out of earlier rounds.
        stochastic: Round without bias instead of to the nearest, where the codec can.
        reducer: How values become an average.
        verify: A second member checks each part.
        bandwidth: Where rates of transfers are counted.
        on_offender: Told who spoils the round, and how.
    """

    def __init__(
        self,
        seal: Seal,
        vector: FlatVector,
        weight: float,
        report: RoundReport,
        *,
        transport: Transport,
        runtime: Runtime,
        config: AveragingConfig,
        feedback: ErrorFeedback | None = None,
        stochastic: bool = False,
        reducer: Reducer = "mean",
        verify: bool = False,
        bandwidth: Bandwidths | None = None,
        on_offender: OnOffender | None = None,
    ) -> None:
        self._shared = Shared(
            seal,
            vector,
            weight,
            report,
            transport,
            runtime,
            config,
            feedback=feedback,
            stochastic=stochastic,
            reducer=reducer,
            verify=verify,
            bandwidth=bandwidth,
            on_offender=on_offender,
        )
        self._mine = next(part for part in self._shared.parts if part.member.peer_id == transport.peer_id)
        self._server = PartServer(self._shared, self._mine)
        self._checker: CheckServer | None = None
        for part in self._shared.parts:
            if part.verified is not None and part.verified.checker == self._shared.place:
                self._checker = CheckServer(self._shared, part, part.verified)

    async def run(self) -> None:
        """Exchange until everything arrived, was given up, or the round's budget ended. Network errors are notes."""
        shared = self._shared
        budget_s = shared.config.round_timeout_s + shared.seal.enter_within_s
        try:
            async with asyncio.timeout(budget_s), asyncio.TaskGroup() as group:
                group.create_task(self._server.reduce())
                for part in shared.parts:
                    if part is not self._mine and part.chunks:
                        group.create_task(self._talk(part))
                    if part.verified is not None:
                        group.create_task(settle_verified(shared, part))
                        if part.verified.checker != shared.place:
                            group.create_task(CheckClient(shared, part, part.verified).talk())
                if self._checker is not None:
                    group.create_task(self._checker.check())
        except TimeoutError:
            shared.report.note(f"the round's budget of {budget_s:g} s ended")
        finally:
            shared.over.set()
        shared.report.contributors = self._server.contributors + (1 if shared.weight > 0 else 0)
        self._compare()

    async def _talk(self, part: Part) -> None:
        client = PartClient(self._shared, part)
        await client.talk()
        if client.gone:
            self._server.gone(part.member.peer_id, client.gone)
            if self._checker is not None:
                self._checker.gone(part.member.peer_id)

    async def serve(self, peer: PeerId, hello: ExchangeHello, stream: ByteStream) -> None:
        """Take a member's values and give it the averages.

        Raises:
            NoGroupError: The peer is no member, or the round is over. MalformedFrameError: It sends something else than
                agreed.
        """
        self._shared.check_hello(peer, hello)
        if not hello.check:
            await self._server.serve(peer, hello, stream)
        elif self._checker is not None:
            await self._checker.serve(peer, hello, stream)
        else:
            raise NoGroupError("This peer checks no part.")

    def _compare(self) -> None:
        shared, report = self._shared, self._shared.report
        agreement = judge({shared.me: shared.result(), **shared.results})
        report.agreed = agreement.agreed
        report.others = agreement.others
