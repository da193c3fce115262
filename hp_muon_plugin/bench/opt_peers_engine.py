"""Peers of ``hp-muon bench optimizer`` that have no ``fully_shard`` below them: DeepSpeed's ZeRO.

Engines reduce gradients in backward, so a backward pass of a loss that is linear in the weights gives them,
outside of the time that is measured, but for the last bucket of the reduction.
"""

import importlib
from typing import Any

import torch
from torch import nn

from hp_muon_plugin.bench.opt_cases import Case, Model, gradient, parts_of
from hp_muon_plugin.bench.opt_contenders import Contender, Peer, Setting
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention
from hp_muon_plugin.bench.opt_memory import WHOLE
from hp_muon_plugin.config.choices import ScaleMode

_NO_CLIPPING = 1e9
"""DeepSpeed clips at 1 where nothing is said, and what it clips is the orthogonal update."""


class _Linear(nn.Module):
    """A loss whose gradients are given.

    Args:
        case: The model.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self.inner = Model(case, is_stacked=False)
        self._step, self._grads = -1, dict[str, torch.Tensor]()

    def forward(self, step: int) -> torch.Tensor:
        """The sum of weights times gradients."""
        if step != self._step:
            self._step = step
            self._grads = {
                f"layers.{weight.layer}.{name}": part
                for weight in self._case.weights
                for name, _, part in parts_of(weight, gradient(weight, step), is_stacked=False)
            }
        return torch.stack([(p * self._grads[name]).sum() for name, p in self.inner.named_parameters()]).sum()


class _ZeroOne(Contender):
    """DeepSpeed's engine; its step orthogonalises, updates a rank's share, and gathers all weights.

    It would compile collectives over shared memory when it starts; without them it takes gloo's, as all others do.
    """

    def __init__(self, setting: Setting) -> None:
        deepspeed = importlib.import_module("deepspeed")
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        loss = _Linear(setting.case)
        params = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "ns_method": "standard"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Muon", "params": params},
            "zero_optimization": {"stage": 1, "reduce_scatter": False},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": _NO_CLIPPING,
        }
        self._engine = deepspeed.initialize(model=loss, config=config, dist_init_required=False)[0]
        # Backward ends with this: it waits for the last reduction, and orthogonalises. It is part of the step here.
        self._finish_backward = self._engine.optimizer.independent_gradient_partition_epilogue
        self._engine.optimizer.independent_gradient_partition_epilogue = lambda: None
        super().__init__(loss.inner, setting, lambda _: self._engine, is_stacked=False)

    def prepare(self, step: int) -> None:
        """See :meth:`Contender.prepare`."""
        self._engine.backward(self._engine(step))

    def step(self) -> None:
        """See :meth:`Contender.step`."""
        self._finish_backward()
        self._engine.step()


def deepspeed_zero(setting: Setting) -> Contender:
    """DeepSpeed's ZeRO 1 with Muon; matrices only, and bf16 iteration: its Gram form is fp16, slow on a CPU."""
    return _ZeroOne(setting)


_DEEPSPEED: dict[str, Any] = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}

PEERS: dict[str, Peer] = {
    "DeepSpeed ZeRO-1": Peer(
        deepspeed_zero,
        Convention(ScaleMode.shape_scaling, dtype="bfloat16"),
        "deepspeed",
        ("deepspeed",),
        has_replicas=False,
        about="ns_method=standard; its step gathers all weights, as ZeRO 1 does",
        environment=_DEEPSPEED,
        venv="deepspeed",
        copies=WHOLE,
    )
}
