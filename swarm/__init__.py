"""swarm: train one PyTorch model together over the internet, on machines that come, go, stall and lie."""

__version__ = "0.1.0"
