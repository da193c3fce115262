"""What tells the messages of one bucket from those of another, where ranks do not run the same units.

Layers are alike, so that the messages of two of them are as long, and a rank would take the weights of another
layer for its own without a word. On the CPU messages have a channel; a rank that runs another unit waits then, and
says for what. Collectives of accelerators have none.
"""

from dataclasses import replace

from hp_muon_plugin.platform.collectives import AxisGroup


class Channels:
    """The axes of a bucket's messages.

    Args:
        axis: Ranks that shard the bucket.
        number: Of the bucket in its model.

    Attributes:
        gather: For the weights.
        reduce: For the gradients.
    """

    def __init__(self, axis: AxisGroup, number: int) -> None:
        self._number = number
        self.gather, self.reduce = replace(axis, channel=3 * number), replace(axis, channel=3 * number + 1)

    def near(self, axis: AxisGroup) -> AxisGroup:
        """For weights that some neighbours keep.

        Args:
            axis: The neighbours.
        """
        return replace(axis, channel=3 * self._number + 2)
