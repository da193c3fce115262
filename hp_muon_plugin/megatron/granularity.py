"""Which unit a weight belongs to, and what of it stays whole on one rank. No torch, so that plans need none."""

import math

from hp_muon_plugin.layout.spec import ParamSpec, Role

ROOT = "root"
_EXPERT_ROLES = (Role.expert_first, Role.expert_second)


def unit_of(name: str, *, is_tied: bool) -> str:
    """The unit of a weight of a GPTModel.

    Args:
        name: Its name in the model.
        is_tied: Whether embedding and output layer share a weight. The model reads it outside of both, so it
            belongs to the root then; and the final norm does not, so that the first and the last pipeline
            stage lay the shared weight out alike.

    Returns:
        Name of a module, or ``ROOT``.
    """
    pieces = name.split(".")
    if "layers" in pieces:
        return ".".join(pieces[: pieces.index("layers") + 2])
    for end in end_units(is_tied=is_tied):
        if name.startswith(f"{end}."):
            return end
    return ROOT


def end_units(*, is_tied: bool) -> tuple[str, ...]:
    """Units of a GPTModel besides its layers.

    Args:
        is_tied: See :func:`unit_of`.

    Returns:
        Names of modules.
    """
    return ("decoder.final_layernorm",) if is_tied else ("embedding", "output_layer")


def atom_of(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, bool]:
    """What of a weight stays whole on one rank.

    Args:
        spec: The weight.
        shape: Of this rank's tensor-parallel part.

    Returns:
        Elements, and whether they are never cut: a whole matrix of a routed expert is never, a row of
        another weight only where padding would grow past the limit, all else may be.
    """
    row = max(1, math.prod(shape[1:])) if len(shape) > 1 else 1
    if len(shape) == 3:
        return row, True
    if spec.role not in _EXPERT_ROLES:
        return row, False
    if not spec.name.endswith((".weight1", ".weight2")):
        return math.prod(shape), True  # one expert
    if spec.role is Role.expert_second and spec.view is not None:
        return math.prod(shape) // spec.view.factors[0], True  # flattened [E * M, N]
    return row, False  # flattened [N, E * M]: no matrix is contiguous


def local_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Shape of the part that one tensor-parallel rank holds.

    Args:
        spec: A weight.

    Returns:
        The shape.
    """
    if spec.split is None:
        return spec.shape
    if spec.split.dim == len(spec.split.factors) - 1:
        return (*spec.shape[:-1], spec.shape[-1] // spec.split.size)
    return (spec.local_numel // spec.shape[-1], spec.shape[-1])
