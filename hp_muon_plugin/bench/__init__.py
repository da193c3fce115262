"""Benchmarks: ours and named peers interleaved in one process, beside the floor of the machine."""
