"""First contact: dial every bootstrap address at once, and say what was wrong with each that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm.errors import BootstrapError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact, Transport

GRACE_S = 1.0
"""How long other peers may still answer when the first one has."""


async def bootstrap_addresses(transport: Transport, addresses: Sequence[tuple[str, PeerId | None]]) -> list[Contact]:
    """Say hello at all addresses at once, until one has worked for each peer, or `GRACE_S` after the first success.

    An address that keeps silent so costs the full patience only where none works.

    Args:
        transport: Started.
        addresses: `host:port` with the id of the peer that should answer there, if it is known.

    Returns:
        The peers that answered in time, in the order of the addresses, each once.

    Raises:
        BootstrapError: None answered; `reasons` says why for each address.
    """
    deadline_s = transport.config.transport.connect_timeout_s
    reasons: dict[str, str] = {}

    async def dial(address: str, expect: PeerId | None) -> Contact | None:
        try:
            async with asyncio.timeout(deadline_s):
                return await transport.dial(address, expect)
        except SwarmError as error:
            reasons[address] = str(error)
        except TimeoutError:
            reasons[address] = f"no answer within {deadline_s:g} s"
        return None

    loop = asyncio.get_running_loop()
    expected = [expect for _, expect in addresses]
    tasks = [loop.create_task(dial(*entry), name=f"bootstrap {entry[0]}") for entry in addresses]
    contacts: dict[PeerId, Contact] = {}
    until_s: float | None = None
    try:
        while True:
            open_ = [
                task
                for task, expect in zip(tasks, expected, strict=True)
                if not task.done() and (expect is None or expect not in contacts)
            ]
            left_s = None if until_s is None else until_s - loop.time()
            if not open_ or (left_s is not None and left_s <= 0):
                break
            await asyncio.wait(open_, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            contacts = {}
            for contact in [task.result() for task in tasks if task.done()]:
                if contact is not None:
                    contacts.setdefault(contact.peer_id, contact)
            if contacts and until_s is None:
                until_s = loop.time() + GRACE_S
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not contacts:
        listed = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        raise BootstrapError(
            f"None of {len(addresses)} bootstrap addresses led into the run ({listed}).",
            fix="Check that the first peer runs and can be reached from here, or get an invite with current addresses.",
            reasons=reasons,
        )
    return list(contacts.values())
