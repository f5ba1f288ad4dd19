"""Measurements: each module prints both sides of a comparison from one run on one machine. Run through `make bench*`."""
