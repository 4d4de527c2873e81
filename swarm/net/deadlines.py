"""Adaptive deadlines: how long to wait for a peer, learned from how long it took before.

Source: algorithms in docs/architecture.md, "Adaptive deadlines".
"""
