"""Swarms on one machine: real processes with faults (`local`), and thousands of peers in virtual time (`virtual`)."""
