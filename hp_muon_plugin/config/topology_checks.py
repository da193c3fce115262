"""Whether the ranks of a job can be laid out as asked."""

from collections.abc import Iterator

from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError


def data_parallel_size(topology: Topology, world_size: int) -> int:
    """Ranks that see different data.

    Args:
        topology: Parallel sizes; must divide ``world_size``.
        world_size: Ranks of the job.

    Returns:
        ``world_size / (tp * pp)``.
    """
    return world_size // (topology.tp * topology.pp)


def topology_errors(topology: Topology, world_size: int) -> Iterator[ConfigError]:
    """Check that the parallel sizes divide the ranks.

    Args:
        topology: Options, every number in its range.
        world_size: Ranks of the job.

    Yields:
        One error for each thing that is wrong.
    """
    dense = topology.tp * topology.pp
    if world_size % dense:
        yield ConfigError(
            "topology.tp",
            topology.tp,
            f"{world_size} ranks cannot be split into groups of tp*pp = {topology.tp}*{topology.pp} = {dense}",
            f"choose tp*pp among the divisors of {world_size}: {divisors(world_size)}",
        )
    expert = topology.ep * topology.etp * topology.pp
    if world_size % expert:
        yield ConfigError(
            "topology.ep",
            topology.ep,
            f"{world_size} ranks cannot be split into groups of ep*etp*pp = "
            f"{topology.ep}*{topology.etp}*{topology.pp} = {expert}",
            f"choose ep*etp*pp among the divisors of {world_size}: {divisors(world_size)}",
        )
    if topology.sequence_parallel and topology.tp == 1:
        yield ConfigError(
            "topology.sequence_parallel",
            True,
            "splits activations over tensor-parallel ranks, and topology.tp=1",
            "set topology.tp=2 or more, or topology.sequence_parallel=false",
        )


def divisors(number: int) -> str:
    """What divides a number, for messages.

    Args:
        number: At least 1.

    Returns:
        Its divisors, separated by commas.
    """
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)
