"""megatron-core's layer-wise Muon without buffer layout on any mesh: trained, saved by its own code, and loaded again.

0.16's Muon wants Emerging-Optimizers, which is not for its Python: torch's Muon stands in to orthogonalise, and
groups, chain, deal, saving and loading are megatron-core's.
"""

from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.megatron.versions import core_version
from lane.upstream_parallel import Parallel


class TorchMuon(torch.optim.Muon):
    """torch's, built as megatron-core 0.16 builds its own."""

    def __init__(self, params: Any, lr: float, momentum_beta: float, weight_decay: float, **_: Any) -> None:
        super().__init__(params, lr=lr, momentum=momentum_beta, weight_decay=weight_decay)


class LayerWise(Parallel):
    """Megatron's objects of a rank."""

    distributed = False

    def _optimizer(self) -> Any:
        from megatron.core import optimizer as factory

        if core_version().lane < (0, 18):
            from megatron.core.optimizer import muon

            muon.HAVE_EMERGING_OPTIMIZERS, muon.TensorParallelMuon = True, TorchMuon
            found = muon.get_megatron_muon_optimizer(
                self.options(optimizer="muon"), self.models, layer_wise_distributed_optimizer=True
            )
        else:
            options = self.options(optimizer="muon", use_layer_wise_distributed_optimizer=True)
            found = factory.get_megatron_optimizer(options, self.models)
        found.allgather_params = found.broadcast_params  # the same of its own, without uneven lists, which gloo refuses
        return found

    def own_file(self, own: Path) -> str:
        """Name that ``save_checkpoint`` gives a rank's file."""
        return str(own / f"layer_wise_optimizer_{self.mpu.get_data_parallel_rank()}.pt")

    def _save_state(self, own: Path) -> None:
        self.optimizer.save_state_dict_to_file(self.own_file(own))

    def _load_state(self, own: Path, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict_from_file(self.own_file(own))
