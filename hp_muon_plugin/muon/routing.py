"""Which optimizer updates which parameter, and why.

Routing goes by role, not by shape alone: an embedding is two-dimensional, and Muon on it trains
badly. Every parameter gets exactly one route with a reason that is printed before training.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from hp_muon_plugin.errors import ConfigError, raise_all
from hp_muon_plugin.layout.spec import ParamSpec, Role


class Algorithm(StrEnum):
    """What updates a parameter."""

    muon = "muon"
    adamw = "adamw"
    frozen = "frozen"


@dataclass(frozen=True, slots=True)
class Route:
    """The decision for one parameter.

    Attributes:
        spec: The parameter.
        algorithm: What updates it.
        reason: Why, in a few words.
    """

    spec: ParamSpec
    algorithm: Algorithm
    reason: str


_ROLE_REASONS: dict[Role, str] = {
    Role.embedding: "embedding: rows are looked up, not multiplied",
    Role.output: "output layer: its input side is the vocabulary",
    Role.router: "router: its scale decides how tokens spread over experts",
    Role.norm: "norm weight",
    Role.bias: "bias",
    Role.vector: "a vector, not a matrix",
    Role.conv: "convolution: no matrix product over the whole input",
    Role.fused_unknown: "fused projection whose parts are not known",
}


def is_adamw_role(role: Role) -> bool:
    """Whether parameters of a role go to AdamW, whatever their shape.

    Args:
        role: The role.

    Returns:
        True if so.
    """
    return role in _ROLE_REASONS


def default_route(spec: ParamSpec) -> tuple[Algorithm, str]:
    """What the role alone says.

    Args:
        spec: The parameter.

    Returns:
        Algorithm and reason. A matrix with a single row or column counts as a vector.
    """
    if not spec.trainable:
        return Algorithm.frozen, "frozen"
    if spec.role in _ROLE_REASONS:
        return Algorithm.adamw, spec.note or _ROLE_REASONS[spec.role]
    if spec.view is None:
        return Algorithm.adamw, "no matrix in it"
    shapes = [spec.view.part_shape(part) for part in spec.view.parts]
    if all(min(rows, cols) == 1 for _, rows, cols in shapes):
        return Algorithm.adamw, "a vector stored as a matrix"
    return Algorithm.muon, spec.note or f"hidden matrix ({spec.role.replace('_', ' ')})"


def route_parameters(
    specs: Sequence[ParamSpec],
    *,
    muon_params: Sequence[str] = (),
    adamw_params: Sequence[str] = (),
    all_names: Sequence[str] | None = None,
) -> tuple[Route, ...]:
    """Route every parameter.

    Args:
        specs: Parameters.
        muon_params: Shell patterns of names that Muon takes against their role.
        adamw_params: Shell patterns of names that AdamW takes against their role.
        all_names: Names of the whole model where this rank holds a part of it, so that a pattern
            for another pipeline stage is not taken for a typing error.

    Returns:
        One route per spec, in order.

    Raises:
        ConfigError: If two parameters have one name, a pattern fits no parameter, two lists fit the
            same one, or Muon is asked to take something that is no matrix.
        ConfigErrors: If several of these are wrong.
    """
    names = [spec.name for spec in specs]
    known = names if all_names is None else all_names
    errors = [
        *_repeated(names),
        *_unmatched("optimizer.muon_params", muon_params, known),
        *_unmatched("optimizer.adamw_params", adamw_params, known),
    ]
    found = [_route(s, _first_match(muon_params, s.name), _first_match(adamw_params, s.name)) for s in specs]
    raise_all(errors + [answer for answer in found if isinstance(answer, ConfigError)])
    return tuple(answer for answer in found if isinstance(answer, Route))


def _route(spec: ParamSpec, asked_muon: str | None, asked_adamw: str | None) -> Route | ConfigError:
    """The route of one parameter, given the pattern of each list that fits it."""
    option = "optimizer.muon_params"
    if spec.trainable and asked_muon and asked_adamw:
        why = f"optimizer.adamw_params={asked_adamw} also fits {spec.name}"
        return ConfigError(option, asked_muon, why, "make the patterns distinct")
    if spec.trainable and asked_muon and spec.view is None:
        why = f"{spec.name} has shape {list(spec.shape)}, which is no matrix"
        return ConfigError(option, asked_muon, why, "leave it out")
    if spec.trainable and asked_muon:
        return Route(spec, Algorithm.muon, f"asked for by muon_params={asked_muon}")
    if spec.trainable and asked_adamw:
        return Route(spec, Algorithm.adamw, f"asked for by adamw_params={asked_adamw}")
    return Route(spec, *default_route(spec))


def _repeated(names: Sequence[str]) -> list[ConfigError]:
    return [
        ConfigError(
            "params",
            name,
            f"is the name of {count} parameters, and routes, tables and errors go by name",
            "put a prefix before the names of each model, e.g. (f'actor.{name}', param)",
        )
        for name, count in Counter(names).items()
        if count > 1
    ]


def _first_match(patterns: Sequence[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _unmatched(option: str, patterns: Sequence[str], names: Sequence[str]) -> list[ConfigError]:
    return [
        ConfigError(
            option,
            pattern,
            "fits no parameter",
            f"names look like {names[0] if names else '(there are none)'}; the routing table lists them",
        )
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
