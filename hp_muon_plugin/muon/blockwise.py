"""The one mode that is an approximation says so."""

import logging
from collections.abc import Iterable
from functools import cache

from hp_muon_plugin.config.choices import TensorParallelMode
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec

logger = logging.getLogger(__name__)


def warn_of_blockwise(config: HpMuon, specs: Iterable[ParamSpec]) -> None:
    """Warn, once in a process, if slices are taken for matrices.

    Args:
        config: Options.
        specs: Of the parameters that are trained.
    """
    is_cut = any(spec.split and spec.split.size > 1 for spec in specs)
    if is_cut and config.tp_mode is TensorParallelMode.blockwise:
        _warn()


@cache
def _warn() -> None:
    logger.warning(
        "tp_mode=blockwise orthogonalises every tensor-parallel rank's slice by itself: the update is not Muon's, "
        "and changes with the number of ranks"
    )
