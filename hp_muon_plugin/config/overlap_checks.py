"""Where the optimizer can begin its exchanges while backward runs."""

from collections.abc import Iterator

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError

_LATE = (
    ("tp", "adds up gradients of weights that tensor-parallel ranks hold whole"),
    ("pp", "adds up gradients of embeddings on two stages"),
)


def overlap_errors(config: Train) -> Iterator[ConfigError]:
    """Check ``optimizer.overlap_backward`` against data parallelism and the mesh.

    Args:
        config: Options.

    Yields:
        One error for each thing that is wrong.
    """
    if not isinstance(config.optimizer, HpMuon) or not config.optimizer.overlap_backward:
        return
    option = "optimizer.overlap_backward"
    if not isinstance(config.dp, HpFsdp):
        yield ConfigError(
            option,
            f"true with dp={config.dp.name}",
            "nothing tells there while backward runs which gradients are reduced",
            f"take dp=hp_fsdp or dp=hp_hsdp, or set {option}=false",
        )
    for name, why in _LATE:
        size = getattr(config.topology, name)
        if size > 1:
            yield ConfigError(
                option,
                f"true with topology.{name}={size}",
                f"begins a step with gradients as backward leaves them, and megatron-core {why} afterwards",
                f"set {option}=false, or topology.{name}=1",
            )
