"""A peer of ``hp-muon bench optimizer``: megatron-core's own layer-wise Muon, ``--optimizer dist_muon``.

It stands on Megatron's DistributedDataParallel: every rank holds all weights in bf16 and all reduced
gradients in float32, updates whole parameters of its own, and the ranks gather the others.
"""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.bench.opt_cases import Model, initial, parts_of
from hp_muon_plugin.bench.opt_contenders import Contender, Peer, Run, Setting
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention
from hp_muon_plugin.bench.opt_memory import WHOLE
from hp_muon_plugin.bench.opt_stand_ins import torch_with_uneven_gathers
from hp_muon_plugin.platform import standin


class _LayerWise(Contender):
    """LayerWiseDistributedOptimizer over TensorParallelMuon, in its form without buffers of its own.

    This rank's runs are float32 masters of the parameters that it owns, where weights of a float32 model would be.
    """

    def __init__(self, setting: Setting) -> None:
        if not standin.is_active():
            standin.activate()  # its optimizers keep tensors on 'cuda'
        library = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
        library.torch = torch_with_uneven_gathers()  # type: ignore[attr-defined]
        muon = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
        config = importlib.import_module("megatron.core.optimizer.optimizer_config")
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        wide, narrow = (
            dict.fromkeys(("dp_cp", "expt_dp"), dist.group.WORLD),
            ("tp", "expt_tp", "gtp_remat", "expt_gtp_remat"),
        )
        groups = SimpleNamespace(**wide, **dict.fromkeys(narrow, alone))
        model = Model(setting.case, is_stacked=False, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]

        def make(_: Any) -> Any:
            inner = muon.TensorParallelMuon(
                list(model.parameters()),
                lr=LEARNING_RATE,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
                coefficient_type="simple",
                scale_mode="spectral",
                extra_scale_factor=0.2,
                fp32_matmul_prec="highest",
                pg_collection=groups,
            )
            options = config.OptimizerConfig(optimizer="muon", bf16=True, clip_grad=0.0, lr=LEARNING_RATE)
            built = library.LayerWiseDistributedOptimizer([inner], options, groups, [lambda *_: None])
            for each in built.chained_optimizers:
                each.tp_group, each.grad_stats_parallel_group = alone, dist.group.WORLD
            return built

        super().__init__(model, setting, make, is_stacked=False)
        starts = {
            f"layers.{weight.layer}.{name}": part
            for weight in setting.case.weights
            for name, _, part in parts_of(weight, initial(weight), is_stacked=False)
        }
        for name, parameter in model.named_parameters():  # masters begin as rounded weights
            if hasattr(parameter, "main_param"):
                parameter.main_param.copy_(starts[name])

    def set_gradient(self, run: Run, grad: torch.Tensor) -> None:
        """See :meth:`Contender.set_gradient`."""
        run.parameter.main_grad.copy_(grad.view(run.parameter.shape))  # type: ignore[attr-defined]

    def _runs(self) -> Iterator[Run]:
        for run in super()._runs():
            main = getattr(run.parameter, "main_param", None)
            if main is not None:
                yield Run(run.weight, run.first, main.detach(), run.parameter)


def dist_muon(setting: Setting) -> Contender:
    """megatron-core's ``dist_muon``; matrices only."""
    return _LayerWise(setting)


PEERS: dict[str, Peer] = {
    "megatron dist_muon": Peer(
        dist_muon,
        Convention(),
        "megatron.core.optimizer.emerging_optimizers",
        ("megatron-core==0.19.2", "emerging-optimizers"),
        needs_python=(3, 12),
        has_replicas=False,
        about="on replicated bf16 weights, as under DDP; masters are compared, and sent are bf16",
        environment={"TORCHDYNAMO_DISABLE": "1"},
        venv="python312",
        copies=WHOLE,
    )
}
