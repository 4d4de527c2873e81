"""State that outlives a peer: snapshots, their transfer to joiners, checkpoints on disk."""
