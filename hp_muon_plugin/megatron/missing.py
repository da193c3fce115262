"""Which parameters took no part in a step, under a wrapper that always has a gradient for each.

Megatron's data-parallel wrapper keeps a buffer for every gradient, zero where nothing arrived, and a
zero gradient is a gradient. So what arrived is noted by hooks, and only where
``optimizer.missing_grad=error`` asks for it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.platform.collectives import all_reduce_max, group_device


class MissingGradients:
    """Notes gradients as they arrive. A parameter is missing if none arrived on any data-parallel rank.

    Args:
        params: The model's trainable parameters and their specs, in the same order on data-parallel ranks.
        groups: Megatron's groups.
    """

    def __init__(self, params: Sequence[tuple[torch.nn.Parameter, ParamSpec]], groups: MegatronGroups) -> None:
        self._params = tuple(params)
        self._groups = groups
        self._arrived = [False] * len(self._params)
        for index, (param, _) in enumerate(self._params):
            hooked: Any = param  # torch leaves this method untyped
            hooked.register_post_accumulate_grad_hook(functools.partial(self._note, index))

    def _note(self, index: int, param: torch.Tensor) -> None:
        self._arrived[index] = True

    def forget(self) -> None:
        """Begin a new step."""
        self._arrived = [False] * len(self._params)

    def find(self) -> torch.Tensor:
        """Look at the step whose gradients are reduced, and begin a new one. Collective.

        Two all-reduces of one number per parameter: over the data-parallel ranks, and for experts
        over theirs. Parameters that were frozen since take no part and are not missing.

        Returns:
            ``(P,)`` float32, 1 for each missing parameter, the same on all data-parallel ranks.
        """
        arrived = torch.tensor(
            [has or not param.requires_grad or _is_filled(param) for has, (param, _) in self._with_params()],
            dtype=torch.float32,
            device=self._device(),
        )
        for is_expert, axis in ((False, self._groups.dp), (True, self._groups.expert_dp)):
            mine = [i for i, (_, spec) in enumerate(self._params) if spec.is_expert == is_expert]
            if mine and axis.size > 1:  # data-parallel ranks have the same parameters, so all of them call
                shared = arrived[mine]
                all_reduce_max(shared, axis)
                arrived[mine] = shared
        self.forget()
        return 1 - arrived

    def names(self, missing: torch.Tensor) -> list[str]:
        """Names for messages.

        Args:
            missing: From :meth:`find`.

        Returns:
            Names of the missing parameters that this rank holds.
        """
        return [spec.name for (_, spec), is_missing in zip(self._params, missing.tolist(), strict=True) if is_missing]

    def _with_params(self) -> list[tuple[bool, tuple[torch.nn.Parameter, ParamSpec]]]:
        return list(zip(self._arrived, self._params, strict=True))

    def _device(self) -> torch.device:
        return self._params[0][0].device if self._params else group_device(self._groups.dp)


def _is_filled(param: torch.nn.Parameter) -> bool:
    """Whether a fused kernel wrote the gradient into the buffer without autograd's knowledge.

    Read by the host for parameters without a noted gradient only.
    """
    grad = getattr(param, "main_grad", None)
    return grad is not None and bool(torch.count_nonzero(grad))
