"""Kinds of collectives by name, for plans that are made without torch."""

from enum import StrEnum


class Collective(StrEnum):
    """What a wire does."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
