"""What a rank does in a second: what every way of orthogonalising is priced by. No torch."""

from dataclasses import dataclass

from hp_muon_plugin.config.optimizer import MuonRates


@dataclass(frozen=True, slots=True)
class Rates:
    """What a rank does in a second.

    Attributes:
        flops: Operations of matrix products.
        bytes_received: Bytes that arrive at a rank, all ranks receiving.
        message_s: Seconds that a message takes on top, for each peer of an all-to-all, and once for others.
        source: Where the figures are from.
        replica_bytes: Bytes that arrive at a rank from replicas, where that is another rate.
    """

    flops: float
    bytes_received: float
    message_s: float
    source: str = "stated"
    replica_bytes: float | None = None

    @property
    def from_replicas(self) -> float:
        """Bytes that arrive at a rank from ranks that hold the same weights."""
        return self.bytes_received if self.replica_bytes is None else self.replica_bytes


# Not measured by us but for the CPU's, which is one core of an AMD EPYC with gloo over loopback. Of the others
# a tenth to a third of the advertised rates of one die (910C: about 376 TFLOP/s bf16, 392 GB/s of HCCS; H100).
DEFAULT_RATES = {
    "cpu": Rates(50e9, 1e9, 2e-4, "default for CPU"),
    "npu": Rates(40e12, 100e9, 2e-5, "default for NPU, not measured"),
    "cuda": Rates(60e12, 100e9, 1e-5, "default for CUDA, not measured"),
}


def rates_of(options: MuonRates, device: str) -> Rates:
    """The rates that options state, and the device's default for those that they leave out.

    Args:
        options: ``optimizer.rates``.
        device: ``cpu``, ``cuda`` or ``npu``; anything else is treated as ``cuda``.

    Returns:
        The rates.
    """
    default = DEFAULT_RATES.get(device, DEFAULT_RATES["cuda"])
    given = [(options.flops_per_s, default.flops), (options.bytes_per_s, default.bytes_received)]
    given.append((options.message_s, default.message_s))
    flops, received, message = (known if stated is None else stated for stated, known in given)
    is_stated = [stated is not None for stated, _ in given]
    source = "optimizer.rates" if all(is_stated) else default.source
    if any(is_stated) and not all(is_stated):
        source = f"optimizer.rates, else {default.source}"
    if options.measure and not all(is_stated):
        source += "; a run measures what is not stated"
    return Rates(flops, received, message, source, options.replica_bytes_per_s)
