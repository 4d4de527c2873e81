"""`swarm demo`: a small language model trained by real processes on this machine, while some of them fail."""
