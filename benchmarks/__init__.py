"""Benchmarks: run as modules, print one JSON line with `--json`."""
