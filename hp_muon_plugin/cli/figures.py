"""Figures of a dry run as text."""

from hp_muon_plugin.muon.rates import Rates

_MIB = 2**20


def rates_text(rates: Rates) -> str:
    """What a prediction is computed from, and where that comes from."""
    replicas = "" if rates.replica_bytes is None else f" ({rates.replica_bytes / 1e9:g} GB/s from replicas)"
    return (
        f"{rates.flops / 1e9:g} GFLOP/s, {rates.bytes_received / 1e9:g} GB/s{replicas} and "
        f"{rates.message_s * 1e6:g} us a message of a rank ({rates.source})"
    )


def gflop(flops: float) -> str:
    """Operations."""
    return f"{flops / 1e9:.3f} GFLOP"


def ratio(most: float, mean: float) -> str:
    """The largest over the mean; 1 where there is nothing."""
    return f"{most / mean:.3f}" if mean else "1.000"


def ms(seconds: float) -> str:
    """Milliseconds, without their unit."""
    return f"{seconds * 1e3:.3g}"


def mib(num_bytes: float) -> str:
    """Bytes."""
    return f"{num_bytes / _MIB:.3f} MiB"


def yes_no_null(value: bool | None) -> str:
    """An option that decides by itself where it is null, as one writes it."""
    return "null" if value is None else str(value).lower()
