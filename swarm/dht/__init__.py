"""The distributed hash table: signed, expiring records on Kademlia routing."""

from swarm.dht.blocking import BlockingDht
from swarm.dht.bootstrap import bootstrap_addresses
from swarm.dht.node import Dht, Put
from swarm.dht.records import Entry
from swarm.dht.watch import Watch

__all__ = ["BlockingDht", "Dht", "Entry", "Put", "Watch", "bootstrap_addresses"]
