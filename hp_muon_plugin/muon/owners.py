"""Who orthogonalises what: the longest job first, to the rank with the least work."""

from collections.abc import Sequence


def assign_owners(costs: Sequence[int], loads: list[int]) -> tuple[int, ...]:
    """Give jobs of one stage to ranks.

    All ranks wait for the last one at the end of a stage, so the work within it counts first; earlier
    stages only break ties, so that single jobs do not all go to the first rank. Within a stage the
    busiest rank has at most ``4/3 - 1/(3 p)`` times the work of the best division (Graham 1969).

    Args:
        costs: Of each job.
        loads: Work of every rank in earlier stages; increased by this one's.

    Returns:
        The rank of each job.
    """
    here = [0] * len(loads)
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        owner = min(range(len(loads)), key=lambda rank: (here[rank], loads[rank], rank))
        owners[job] = owner
        here[owner] += costs[job]
    for rank, work in enumerate(here):
        loads[rank] += work
    return tuple(owners)
