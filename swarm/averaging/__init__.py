"""Averaging parameters with other peers: group forming, butterfly all-reduce, pairwise gossip."""
