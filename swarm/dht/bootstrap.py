"""First contact: dial every bootstrap address at once, and say what was wrong with each that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarm.errors import BootstrapError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import Contact, Transport


async def bootstrap_addresses(transport: Transport, addresses: Sequence[tuple[str, PeerId | None]]) -> list[Contact]:
    """Say hello at all addresses at once.

    Args:
        transport: Started.
        addresses: `host:port` with the id of the peer that should answer there, if it is known.

    Returns:
        The peers that answered, in the order of the addresses, each once.

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

    answers = await asyncio.gather(*(dial(address, expect) for address, expect in addresses))
    contacts = {contact.peer_id: contact for contact in answers if contact is not None}
    if not contacts:
        listed = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        raise BootstrapError(
            f"None of {len(addresses)} bootstrap addresses led into the run ({listed}).",
            fix="Check that the first peer runs and can be reached from here, or get a ticket with current addresses.",
            reasons=reasons,
        )
    return list(contacts.values())
