"""Adam as Apex and Transformer Engine have it, without their kernels: the step count belongs to the group.

megatron-core's DistributedOptimizer cannot load what it saved where it finds neither (KeyError 'step'), so users of it
have one of them. Both need CUDA. This class keeps the same state, so that Megatron's own loading code runs here as it
runs there.
"""

import operator
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with ``step`` in the group, and ``exp_avg`` and ``exp_avg_sq`` alone in the state.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        weight_decay: Decoupled.
        betas: Decay of both averages.
        eps: Added to the root.
        options: What the fused classes take beyond; of no consequence here.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), number = group["betas"], int(group["step"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**number)).sqrt_().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**number))


class StrictFusedAdam(FusedAdam):
    """What Transformer Engine's refuses is refused: steps that are no ints, state that it does not know."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load."""
        unknown = {kind for kinds in state_dict["state"].values() for kind in kinds} - {"exp_avg", "exp_avg_sq"}
        if unknown:
            raise KeyError(unknown)
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            assert group["bias_correction"]
            operator.index(group.get("step", 0))
        super().step()


class TensorStepAdam(FusedAdam):
    """MindSpeed's keeps the count as a tensor in the group, and asks it for its device."""

    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            group.setdefault("step", torch.tensor(0, dtype=torch.int64))
            assert group["step"].is_cpu
        super().step()


def use_fused_adam(kind: type[torch.optim.Optimizer] = FusedAdam) -> None:
    """Let megatron-core find it as it finds Apex's. In a rank of a test only: nothing puts the old one back.

    Args:
        kind: The class.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    for module in (optimizer, distrib_optimizer):
        module.Adam = kind
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
