"""Which ranks sit together behind fast links, and what it costs to shard across them.

A supernode is the largest set of ranks without a slow link between them: on Ascend A3 what HCCS and UB
join, elsewhere a node. A shard group should stay inside one; replicas may lie in others (HSDP).
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.rank_table import read_rank_table

OPTION = "topology.ranks_per_supernode"


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes that one rank exchanges with other supernodes in a step, in its busier direction.

    The figures are those of the busiest rank, with W ranks in the group, c of them in that rank's
    supernode, and B bytes of whole (not sharded) buffers gathered or scattered in the step. An
    all-gather receives what a reduce-scatter sends, so both cost the same.

    Attributes:
        ring_bytes: ``(W - 1) / W * B`` for a rank whose neighbour in a ring in group order is elsewhere.
        flat_bytes: ``(W - c) / W * B`` where each rank exchanges with every other directly.
        least_bytes: ``(W - c) / (W * c) * B``: whatever the algorithm, each byte kept elsewhere must
            enter (all-gather) or a partial sum of it leave (reduce-scatter) once, and c ranks can share that.
    """

    ring_bytes: int
    flat_bytes: int
    least_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """The supernode of every rank.

    Attributes:
        supernode_of: Supernode number of each global rank, numbered by first appearance.
        source: How this is known, for messages.
    """

    supernode_of: tuple[int, ...]
    source: str

    @classmethod
    def uniform(cls, world_size: int, ranks_per_supernode: int, *, source: str = "") -> "Topology":
        """Supernodes of equally many consecutive ranks; the last may be smaller.

        Args:
            world_size: Ranks of the job.
            ranks_per_supernode: Ranks of a supernode.
            source: How this is known; the option itself by default.

        Returns:
            The topology.

        Raises:
            ConfigError: If the number is not positive.
        """
        if ranks_per_supernode < 1:
            fix = "set the number of ranks behind fast links: 16 for one A3 node, up to 768 for a supernode"
            raise ConfigError(OPTION, ranks_per_supernode, "a supernode has at least one rank", fix)
        numbers = tuple(rank // ranks_per_supernode for rank in range(world_size))
        return cls(numbers, source or f"{OPTION}={ranks_per_supernode}")

    @classmethod
    def from_labels(cls, labels: Sequence[str | int], *, source: str) -> "Topology":
        """The topology that host names or supernode ids describe.

        Args:
            labels: One for each rank, as :func:`own_label` gives them; equal ones are one supernode.
            source: Where they come from, for messages.

        Returns:
            The topology.
        """
        numbers: dict[str | int, int] = {}
        return cls(tuple(numbers.setdefault(label, len(numbers)) for label in labels), source)

    def supernodes(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The supernodes that a group covers.

        Args:
            ranks: Global ranks.

        Returns:
            Supernode numbers, ascending, each once.
        """
        return tuple(sorted({self.supernode_of[rank] for rank in ranks}))

    def crossing(self, ranks: Sequence[int], bytes_per_step: int) -> Crossing:
        """What a group costs between supernodes; the formulas are those of :class:`Crossing`.

        Args:
            ranks: Global ranks of a shard group, in group order.
            bytes_per_step: Whole buffers gathered and scattered in a step, B of :class:`Crossing`.

        Returns:
            The cost; zeros for a group inside one supernode.
        """
        places = [self.supernode_of[rank] for rank in ranks]
        size, counts = len(places), Counter(places)
        if len(counts) <= 1:
            return Crossing(0, 0, 0)
        # two neighbours of a ring are apart in any group that covers two supernodes
        fewest = min(counts.values())
        return Crossing(
            ring_bytes=bytes_per_step * (size - 1) // size,
            flat_bytes=bytes_per_step * (size - fewest) // size,
            least_bytes=bytes_per_step * (size - fewest) // (size * fewest),
        )

    def largest_shard_size(self, ranks: Sequence[int]) -> int:
        """How far a group can be sharded without leaving a supernode.

        Args:
            ranks: Global ranks of the group, in group order.

        Returns:
            The largest divisor of the group's size whose consecutive blocks each stay inside one supernode.
        """
        size = len(ranks)
        divisors = (count for count in range(size, 0, -1) if size % count == 0)
        return next(count for count in divisors if self._blocks_stay_inside(ranks, count))

    def check_shard_group(self, option: str, ranks: Sequence[int], bytes_per_step: int) -> ConfigError | None:
        """Check that a shard group stays inside one supernode.

        Args:
            option: Option that made the group, for the message.
            ranks: Global ranks of the group, in group order.
            bytes_per_step: As for :meth:`crossing`.

        Returns:
            What to tell the user, to raise or to log; None if the group stays inside.
        """
        covered = self.supernodes(ranks)
        if len(covered) <= 1:
            return None
        cost = self.crossing(ranks, bytes_per_step)
        why = (
            f"the shard group of {len(ranks)} ranks covers {len(covered)} supernodes (known from {self.source}); "
            f"in each step one rank moves {_gib(cost.ring_bytes)} between them in a ring, {_gib(cost.flat_bytes)} "
            f"directly, and at least {_gib(cost.least_bytes)}"
        )
        inside = self.largest_shard_size(ranks)
        fix = f"shard over {inside} ranks and replicate over {len(ranks) // inside}"
        if inside == 1:
            fix = "put the ranks of a shard group next to each other, so that shards lie inside supernodes"
        return ConfigError(option, len(ranks), why, f"{fix}; if these ranks share a supernode, set {OPTION}")

    def check_contiguous(self) -> ConfigError | None:
        """Check that supernodes are runs of consecutive ranks, as HCCL's documentation asks for.

        Returns:
            What to tell the user; None if they are.
        """
        starts = [
            number
            for rank, number in enumerate(self.supernode_of)
            if rank == 0 or number != self.supernode_of[rank - 1]
        ]
        apart = sorted(number for number, count in Counter(starts).items() if count > 1)
        if not apart:
            return None
        ranks = [rank for rank, number in enumerate(self.supernode_of) if number == apart[0]]
        why = f"supernode {apart[0]} holds ranks {ranks}, which are not consecutive (known from {self.source})"
        return ConfigError("topology", f"{len(apart)} supernodes apart", why, "start ranks supernode by supernode")

    def _blocks_stay_inside(self, ranks: Sequence[int], count: int) -> bool:
        blocks = (ranks[start : start + count] for start in range(0, len(ranks), count))
        return all(len(self.supernodes(block)) == 1 for block in blocks)


def discover(world_size: int, environ: Mapping[str, str], *, ranks_per_supernode: int | None = None) -> Topology:
    """The topology as far as this rank knows it without asking the others.

    The first that is there: the option, ``RANK_TABLE_FILE``, ``LOCAL_WORLD_SIZE`` (a node is taken for
    a supernode, the careful guess), and otherwise one supernode of all ranks.

    Args:
        world_size: Ranks of the job.
        environ: The environment.
        ranks_per_supernode: The option; None to discover.

    Returns:
        The topology, the same on all ranks.

    Raises:
        ConfigError: If a source contradicts itself or the job.
    """
    if ranks_per_supernode is not None:
        return Topology.uniform(world_size, ranks_per_supernode)
    if environ.get("RANK_TABLE_FILE"):
        path = environ["RANK_TABLE_FILE"]
        return Topology.from_labels(read_rank_table(path, world_size), source="RANK_TABLE_FILE")
    if "LOCAL_WORLD_SIZE" in environ:
        size = _number(environ, "LOCAL_WORLD_SIZE", least=1)
        _check_node(environ, size)
        return Topology.uniform(world_size, size, source=f"LOCAL_WORLD_SIZE={size}, one node as one supernode")
    return Topology((0,) * world_size, "nothing: no option, rank table or LOCAL_WORLD_SIZE, so one supernode")


def own_label(environ: Mapping[str, str], host_name: str) -> str:
    """What this rank knows of its own place; gathered over all ranks it makes :meth:`Topology.from_labels`.

    Args:
        environ: The environment.
        host_name: Name of this host.

    Returns:
        The logical supernode's id if HCCL is told one, else torchrun's node number, else the host.
    """
    if environ.get("HCCL_LOGIC_SUPERPOD_ID"):
        return f"supernode {environ['HCCL_LOGIC_SUPERPOD_ID']}"
    return f"node {environ['GROUP_RANK']}" if environ.get("GROUP_RANK") else f"host {host_name}"


def _check_node(environ: Mapping[str, str], local_size: int) -> None:
    """Nodes of unequal sizes show where torchrun's node number is not the one that the rank implies."""
    if "RANK" not in environ or "GROUP_RANK" not in environ:
        return
    rank, node = _number(environ, "RANK", least=0), _number(environ, "GROUP_RANK", least=0)
    if rank // local_size != node:
        why = f"rank {rank} is on node {node}, so nodes hold unequally many ranks, or ranks are not in node order"
        fix = f"set {OPTION}, or give the job a RANK_TABLE_FILE"
        raise ConfigError("LOCAL_WORLD_SIZE", local_size, why, fix)


def _number(environ: Mapping[str, str], name: str, *, least: int) -> int:
    text = environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(name, text, f"is no number of {least} or more", f"unset {name}, or start with torchrun")
    return int(text)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / 2**30:.2f} GiB)"
