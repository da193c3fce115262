"""Beginning a step's first exchanges while backward runs, as soon as their gradients are reduced.

Nothing that a step changes is changed: what is sent is made of copies of momenta, which the step computes
again. So a step that never comes needs nothing but to forget what was sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.errors import ConfigError, GradientError
from hp_muon_plugin.muon.distributed.executor import ShareExecutor
from hp_muon_plugin.muon.distributed.shards import GradientListener
from hp_muon_plugin.muon.distributed.share import Share
from hp_muon_plugin.muon.executor import ParamStep
from hp_muon_plugin.muon.gradients import listed

Grads = Mapping[torch.nn.Parameter, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reductions:
    """Where an optimizer learns what backward has reduced.

    Attributes:
        listen: Lets a model tell a listener, instead of the one before.
        grad_of: The reduced gradient of a shard, or None where this rank updates none of it.
    """

    listen: Callable[[GradientListener], None]
    grad_of: Callable[[torch.nn.Parameter], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A gradient that has been sent, and how it can be seen to change afterwards."""

    place: int
    version: int
    beta: float


class Ahead:
    """Begins the first batches of one share. Only one share can: all of them use the same buffers.

    Args:
        executor: The share's.
        share: The share.
        look_ahead: Steps of some of the optimizer's parameters with momenta as they will be, from their gradients.
        betas: Present decay of the momentum of each of the optimizer's parameters.
        name_of: Name of one of them.
        reductions: Where gradients come from.
    """

    def __init__(
        self,
        executor: ShareExecutor,
        share: Share,
        *,
        look_ahead: Callable[[Grads], Mapping[int, ParamStep | None]],
        betas: Callable[[], Mapping[torch.nn.Parameter, float]],
        name_of: Callable[[torch.nn.Parameter], str],
        reductions: Reductions,
    ) -> None:
        self._executor, self._share, self._look_ahead = executor, share, look_ahead
        self._betas, self._name_of, self._grad_of = betas, name_of, reductions.grad_of
        self._places = {shard: index for index, shard in enumerate(share.shards)}
        self._there: set[int] = set()
        self._sent: dict[int, _Sent] = {}
        reductions.listen(self)

    def begun(self) -> None:
        """A backward pass begins, and adds to gradients: what was sent of them is forgotten."""
        self.withdraw()

    @torch.no_grad()
    def reduced(self, shards: Sequence[torch.nn.Parameter]) -> None:
        """Begin the batches whose gradients are all there, as far as there are buffers.

        Args:
            shards: Whose gradients are reduced now.
        """
        self._there.update(self._places[shard] for shard in shards if shard in self._places)
        self._executor.go_on()
        while (needed := self._executor.next_of(self._there)) is not None:
            self._executor.begin(self._there, self._look_ahead(self._take(sorted(needed))))

    def _take(self, params: Sequence[int]) -> dict[torch.nn.Parameter, torch.Tensor]:
        found = {index: grad for index in params if (grad := self._grad(index)) is not None}
        self._sent |= self._marks(found)
        mains = self._share.mains
        return {main: grad.to(main.dtype) for index, grad in found.items() if (main := mains[index]) is not None}

    def _grad(self, index: int) -> torch.Tensor | None:
        return None if self._share.mains[index] is None else self._grad_of(self._share.shards[index])

    def _marks(self, grads: Mapping[int, torch.Tensor]) -> dict[int, _Sent]:
        betas, mains = self._betas(), self._share.mains
        return {
            index: _Sent(grad.data_ptr(), grad._version, betas[main])
            for index, grad in grads.items()
            if (main := mains[index]) is not None
        }

    def _now(self) -> dict[int, _Sent]:
        return self._marks({index: grad for index in self._sent if (grad := self._grad(index)) is not None})

    def withdraw(self) -> None:
        """Forget what has begun: its step does not come."""
        self._executor.withdraw()
        self.ended()

    def ended(self) -> None:
        """The step has taken over what had begun."""
        self._there.clear()
        self._sent.clear()

    def check(self) -> None:
        """Refuse a step whose gradients or momentum are not those that were sent.

        Raises:
            GradientError: On the ranks that hold such a gradient.
        """
        now = self._now()
        changed = [
            self._name_of(main)
            for index, sent in self._sent.items()
            if now.get(index) != sent and (main := self._share.mains[index]) is not None
        ]
        if changed:
            self.withdraw()
            raise GradientError(
                f"{listed(changed)}: the gradient, or the momentum of its group, was changed between backward and "
                "step(), and optimizer.overlap_backward=true has sent what it was before\n"
                "  fix: change momentum before backward; to change gradients, set optimizer.overlap_backward=false"
            )

    def note_clipped(self) -> None:
        """Other gradients that lie in the same buffers were scaled by the optimizer itself."""
        self._sent = self._now()


def overlap_error(value: str, why: str) -> ConfigError:
    """The error of ``overlap_backward`` where gradients are not known early.

    Args:
        value: What the option is used with.
        why: Why that cannot be.

    Returns:
        The error.
    """
    return ConfigError(
        "optimizer.overlap_backward",
        f"true with {value}",
        why,
        "set optimizer.overlap_backward=false, or shard the model with hp_fully_shard (dp=hp_fsdp or dp=hp_hsdp)",
    )
