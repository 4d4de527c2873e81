"""The distributed hash table: signed, expiring records on Kademlia routing."""

from swarm.dht.bootstrap import bootstrap_addresses
from swarm.dht.node import Dht, Put
from swarm.dht.records import Entry

__all__ = ["Dht", "Entry", "Put", "bootstrap_addresses"]
