"""How large the orthogonal update of a matrix is.

Newton-Schulz returns a matrix whose singular values are all near 1, whatever the gradient was; the
scale decides how far a learning rate moves the weight. It is always computed from the logical
``(rows, cols)`` of the matrix, never from a padded or sharded shape.
"""

import math
from collections.abc import Callable

from hp_muon_plugin.config.choices import ScaleMode

_FORMULAS: dict[ScaleMode, Callable[[int, int], float]] = {
    # Moonlight (arXiv 2502.16982, eq. 4): the update then has AdamW's usual RMS of about 0.2.
    ScaleMode.match_rms_adamw: lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # The same without the factor 0.2; "spectral" of Megatron and NVIDIA Emerging-Optimizers.
    ScaleMode.spectral: lambda rows, cols: math.sqrt(max(rows, cols)),
    # Keller Jordan's Muon: sqrt(max(1, rows / cols)); "original" of torch.optim.Muon.
    ScaleMode.shape_scaling: lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    # Scion (arXiv 2502.07529): sqrt(rows / cols), which keeps the RMS-to-RMS operator norm at 1.
    ScaleMode.unit_rms: lambda rows, cols: math.sqrt(rows / cols),
    ScaleMode.none: lambda rows, cols: 1.0,
}


def update_scale(mode: ScaleMode, rows: int, cols: int, *, factor: float = 1.0) -> float:
    """Factor between the orthogonal matrix and the update.

    Args:
        mode: Which formula.
        rows: Rows of the logical matrix, the output size of the layer.
        cols: Columns of the logical matrix, the input size of the layer.
        factor: Extra factor, ``optimizer.scale_factor``.

    Returns:
        A plain number; the weight changes by ``-lr * scale * O``.
    """
    if rows == 0 or cols == 0:
        return factor
    return factor * _FORMULAS[mode](rows, cols)
