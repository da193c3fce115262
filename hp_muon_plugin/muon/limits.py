"""How large what Newton-Schulz works on at once may be. No torch, so that plans need none."""

DEVICE_BYTES = 64 << 20
# On the CPU matrices are worked on while they lie in the second-level cache. Small ones are not cut:
# there the calls would cost more than the cache saves.
_CPU_CACHE_BYTES = 1 << 20  # per thread
# In half precision a product costs 20 us more than its arithmetic, which is less for several matrices at once
# than the cache saves.
_CPU_HALF_BYTES = 8 << 20
_CPU_CUT_FROM = 64
_SMALL_BUFFERS_BYTES = 16  # four float32 buffers per entry of the m x m matrices


def chunk_limit(device: str, short: int, *, itemsize: int, num_threads: int, max_bytes: int | None = None) -> int:
    """How many matrices are worked on at once.

    Args:
        device: ``cpu``, ``cuda``, ``npu``.
        short: Side ``m`` of their small matrices.
        itemsize: Bytes of a number in products.
        num_threads: Threads of a product.
        max_bytes: Limit for ``16 B m^2``; None for the device's default.

    Returns:
        ``B``, at least 1.
    """
    if max_bytes is None:
        is_cut = device == "cpu" and short >= _CPU_CUT_FROM
        cache = _CPU_CACHE_BYTES if itemsize == 4 else _CPU_HALF_BYTES
        max_bytes = cache * num_threads if is_cut else DEVICE_BYTES
    return max(1, max_bytes // (_SMALL_BUFFERS_BYTES * short * short))
