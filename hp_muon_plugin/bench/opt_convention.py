"""What a Muon step is in each library, and the single-process reference of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from hp_muon_plugin.bench.opt_cases import STEPS, Case, Weight, gradient, initial
from hp_muon_plugin.config.choices import ScaleMode, Schedule
from hp_muon_plugin.muon.coefficients import Coefficients, resolve_schedule
from hp_muon_plugin.muon.reference import reference_newton_schulz
from hp_muon_plugin.muon.scale import update_scale

LEARNING_RATE, WEIGHT_DECAY, MOMENTUM = 2e-2, 0.1, 0.95
JUDGED_STEPS = 2
LEAST_LIMIT = 1e-4
"""Error of float32 results up to which they are right in any case."""
_TIMES_NOISE = 4.0
_EPS = 1e-7


class Decay(StrEnum):
    """What weight decay multiplies a weight by."""

    decoupled = "decoupled"  # 1 - lr * decay
    scaled = "scaled"  # 1 - lr * scale * decay: the scale of the update is taken for a part of the learning rate


@dataclass(frozen=True, slots=True)
class Convention:
    """A library's own.

    Momentum is a moving average or a sum, which have one direction; all look ahead (Nesterov).

    Attributes:
        scale: Scale of the update.
        schedule: Newton-Schulz coefficients.
        dtype: Name of the type that it iterates in.
        decay: What decays.
        grad_share: What the look-ahead adds to the moving average of the gradient: this much of the gradient itself.
    """

    scale: ScaleMode = ScaleMode.match_rms_adamw
    schedule: Schedule = Schedule.keller
    dtype: str = "float32"
    decay: Decay = Decay.decoupled
    grad_share: float = (1 - MOMENTUM) / MOMENTUM

    @property
    def rows(self) -> tuple[Coefficients, ...]:
        """``(a, b, c)`` of every step."""
        return resolve_schedule(self.schedule, steps=STEPS)


@dataclass(slots=True)
class Reference:
    """One process that holds all weights and takes all steps, in float64 and in each type of the conventions.

    Attributes:
        case: The model.
    """

    case: Case
    _directions: dict[tuple[object, ...], dict[str, list[torch.Tensor]]] = field(default_factory=dict)

    def directions(self, convention: Convention, dtype: str) -> dict[str, list[torch.Tensor]]:
        """Orthogonal directions of every step.

        Args:
            convention: Whose.
            dtype: Name of the type to iterate in; float64 is the oracle.

        Returns:
            By name of the weight, one for each step.
        """
        key = (convention.rows, convention.grad_share, dtype)
        if key not in self._directions:
            self._directions[key] = {w.full_name: _directions(w, convention, dtype) for w in self.case.weights}
        return self._directions[key]

    def changes(self, convention: Convention, dtype: str) -> dict[str, torch.Tensor]:
        """How weights differ after all steps from what they were.

        Args:
            convention: Whose.
            dtype: Name of the type to iterate in.

        Returns:
            By name of the weight, float64.
        """
        directions = self.directions(convention, dtype)
        return {w.full_name: _change(w, directions[w.full_name], convention) for w in self.case.weights}

    def judge(self, convention: Convention, found: Iterable[Mapping[str, list[tuple[int, torch.Tensor]]]]) -> "Verdict":
        """Compare what ranks hold with the reference.

        Args:
            convention: Whose.
            found: For each rank, by name of the weight, runs of elements of the weights that it holds: first
                element, and values.

        Returns:
            The verdict.
        """
        wanted = self.changes(convention, "float64")
        same = self.changes(convention, convention.dtype)
        ranks = list(found)
        worst = Verdict(0.0, LEAST_LIMIT, "")
        for weight in self.case.weights:
            want = wanted[weight.full_name]
            noise = _ratio((same[weight.full_name] - want).square().sum(), want.square().sum())
            limit = max(LEAST_LIMIT, _TIMES_NOISE * noise)
            error = _error(weight, want, [rank.get(weight.full_name, []) for rank in ranks])
            if error / limit >= worst.error / worst.limit:
                worst = Verdict(error, limit, weight.full_name)
        return worst


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is right.

    Attributes:
        error: Relative error of the change of one parameter, the one furthest over its limit.
        limit: What is allowed: four times what the plain iteration in the library's own type is off by.
        name: The parameter.
    """

    error: float
    limit: float
    name: str

    @property
    def is_right(self) -> bool:
        """Whether every parameter is within its limit."""
        return self.error <= self.limit


def _directions(weight: Weight, convention: Convention, dtype: str) -> list[torch.Tensor]:
    rows = convention.rows
    momentum = torch.zeros(weight.shape, dtype=torch.float64)
    found = []
    for step in range(JUDGED_STEPS):
        grad = gradient(weight, step).double()
        momentum.mul_(MOMENTUM).add_(grad, alpha=1 - MOMENTUM)
        ahead = momentum + grad * convention.grad_share
        matrices = ahead.view(-1, *weight.shape[-2:])
        if dtype == "float64":
            done = [reference_newton_schulz(matrix, rows) for matrix in matrices]
        else:
            done = [_plain(matrix, rows, getattr(torch, dtype)) for matrix in matrices]
        found.append(torch.stack(done).view(weight.shape))
    return found


def _plain(matrix: torch.Tensor, rows: Sequence[Coefficients], dtype: torch.dtype) -> torch.Tensor:
    """The iteration as most write it: cast, normalise, and products in the type."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.mT if is_tall else x
    x = x / (x.norm() + _EPS)
    for a, b, c in rows:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).double()


def _change(weight: Weight, directions: Sequence[torch.Tensor], convention: Convention) -> torch.Tensor:
    start = initial(weight).double()
    scale = update_scale(convention.scale, *weight.shape[-2:])
    shrink = LEARNING_RATE * WEIGHT_DECAY * (scale if convention.decay is Decay.scaled else 1.0)
    value = start.clone()
    for direction in directions:
        value.mul_(1 - shrink).add_(direction, alpha=-LEARNING_RATE * scale)
    return value - start


def _error(weight: Weight, wanted: torch.Tensor, ranks: Sequence[Sequence[tuple[int, torch.Tensor]]]) -> float:
    """Relative error of a weight over all copies that ranks hold of its elements."""
    start, want = initial(weight).double().view(-1), wanted.view(-1)
    seen = torch.zeros(weight.numel, dtype=torch.bool)
    above = below = torch.zeros((), dtype=torch.float64)
    for first, value in (run for rank in ranks for run in rank):
        place = slice(first, first + value.numel())
        seen[place] = True
        above = above + (value.double().view(-1) - start[place] - want[place]).square().sum()
        below = below + want[place].square().sum()
    return _ratio(above, below) if bool(seen.all()) else 1.0


def _ratio(above: torch.Tensor, below: torch.Tensor) -> float:
    ratio = float(above / below) ** 0.5
    return ratio if ratio == ratio else 1.0  # NaN: as wrong as can be, and still a number in JSON
