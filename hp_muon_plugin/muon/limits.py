"""How large what Newton-Schulz works on at once may be. No torch, so that plans need none."""

DEVICE_BYTES = 64 << 20
# On the CPU matrices are worked on while they lie in the second-level cache. Small ones are not cut:
# there the calls would cost more than the cache saves.
CPU_CACHE_BYTES = 1 << 20  # per thread
CPU_CUT_FROM = 64
SMALL_BUFFERS_BYTES = 16  # four float32 buffers per entry of the m x m matrices
