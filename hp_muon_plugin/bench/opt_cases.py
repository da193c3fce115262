"""Models of ``hp-muon bench optimizer``: matrices of a 505B model with every side divided, and their gradients."""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hp_muon_plugin.bench.ns_cases import Case as Shape
from hp_muon_plugin.bench.ns_cases import parse_case as parse_shape
from hp_muon_plugin.errors import ConfigError

_PATTERN = re.compile(r"(\d+)(dense|moe(\d+))")
_LAYERS = re.compile(r"([^/]+?)(?:/(\d+))?")
_DIVISORS = (1, 2, 4, 8, 16, 32, 64)
_SEED = 11
STEPS = 5

# Hidden size 5120, latent attention, expert size 1792; as (rows, columns), rows being outputs.
_ATTENTION = {
    "q_down": (1536, 5120),
    "q_up": (12288, 1536),
    "kv_down": (576, 5120),
    "kv_up": (16384, 512),
    "out": (5120, 8192),
}
_MLP = {"mlp_gate": (18432, 5120), "mlp_up": (18432, 5120), "mlp_down": (5120, 18432)}
_EXPERT = {"gate": (1792, 5120), "up": (1792, 5120), "down": (5120, 1792)}


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter.

    Attributes:
        layer: Layer, which is a unit of sharding.
        name: Name in the layer.
        shape: ``(rows, columns)``, or ``(matrices, rows, columns)`` of stacked experts.
    """

    layer: int
    name: str
    shape: tuple[int, ...]

    @property
    def full_name(self) -> str:
        """Name in the model."""
        return f"layers.{self.layer}.{self.name}"

    @property
    def num_matrices(self) -> int:
        """Matrices in it."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def numel(self) -> int:
        """Elements."""
        return self.num_matrices * self.shape[-2] * self.shape[-1]

    def ns_flops(self) -> float:
        """Operations of five Newton-Schulz steps, by the plain or the Gram form, whichever has fewer.

        Only the square products of ``m x m`` and the products with the long side count; that a product
        with its own transpose is symmetric is not used.
        """
        short, long = sorted(self.shape[-2:])
        plain = STEPS * (4 * short**2 * long + 2 * short**3)
        gram = 4 * short**2 * long + (STEPS + 3 * (STEPS - 1)) * 2 * short**3
        return float(self.num_matrices * min(plain, gram))


@dataclass(frozen=True, slots=True)
class Case:
    """One model.

    Attributes:
        text: As it was written.
        weights: Its parameters, in order.
    """

    text: str
    weights: tuple[Weight, ...]

    def __str__(self) -> str:
        return self.text


NAMED = {"505b": "1dense+1moe16/8", "dense": "2dense/8", "experts": "[48,224,640]", "fused": "74x24x10240"}


def parse_case(text: str, option: str) -> Case:
    """Read a case.

    Args:
        text: A name, or pieces joined by ``+``: ``2dense``, ``1moe16`` (layers, with 16 experts) with one divisor of
            all sides after a slash at the end (8 if it is left out), or shapes such as ``74x24x10240`` (each a layer
            of separate matrices) and ``[48,224,640]`` (stacked ones), which nothing divides.
        option: Where it was given, for messages.

    Returns:
        The case.

    Raises:
        ConfigError: If it is none.
    """
    found = _LAYERS.fullmatch(NAMED.get(text, text))
    divisor = int(found[2] or 8) if found else 0
    if not found or divisor not in _DIVISORS:
        raise _no_case(text, option)
    weights: list[Weight] = []
    layer = 0
    for piece in found[1].split("+"):
        layers = _PATTERN.fullmatch(piece)
        if layers is None:
            try:
                shape = parse_shape(piece, option)
            except ConfigError:
                raise _no_case(text, option) from None
            weights += _from_shape(shape, layer)
            layer += 1
            continue
        if int(layers[1]) == 0 or layers[3] == "0":
            raise _no_case(text, option)
        for _ in range(int(layers[1])):
            weights += _layer(layer, divisor, int(layers[3] or 0))
            layer += 1
    return Case(text, tuple(weights))


def _no_case(text: str, option: str) -> ConfigError:
    known = ", ".join(NAMED)
    fix = f"write one of {known}, or such as 1dense+1moe16/8, 74x24x10240 or [48,224,640]"
    return ConfigError(option, text, "is no case", fix)


def _from_shape(shape: Shape, layer: int) -> list[Weight]:
    if shape.is_stack:
        return [Weight(layer, "experts_up", (shape.count, shape.rows, shape.cols))]
    return [Weight(layer, f"matrix_{number}", (shape.rows, shape.cols)) for number in range(shape.count)]


def _layer(layer: int, divisor: int, experts: int) -> list[Weight]:
    def divided(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(side // divisor for side in shape)

    weights = [Weight(layer, name, divided(shape)) for name, shape in _ATTENTION.items()]
    if not experts:
        return weights + [Weight(layer, name, divided(shape)) for name, shape in _MLP.items()]
    weights += [Weight(layer, f"shared_{name}", divided(shape)) for name, shape in _EXPERT.items()]
    return weights + [Weight(layer, f"experts_{name}", (experts, *divided(shape))) for name, shape in _EXPERT.items()]


class Layer(nn.Module):
    """Parameters of one layer; it computes nothing."""


class Model(nn.Module):
    """Layers of parameters.

    Args:
        case: Which.
        is_stacked: Whether experts are stacked in one parameter, or one parameter each: some peers know
            matrices only.
        dtype: Of the parameters.
    """

    def __init__(self, case: Case, *, is_stacked: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(1 + max(weight.layer for weight in case.weights))])
        for weight in case.weights:
            start = initial(weight)
            for name, _, value in parts_of(weight, start, is_stacked=is_stacked):
                parameter = nn.Parameter(value.to(dtype, copy=True))
                self.layers[weight.layer].register_parameter(name, parameter)


def parts_of(weight: Weight, whole: torch.Tensor, *, is_stacked: bool) -> Iterator[tuple[str, int, torch.Tensor]]:
    """A value of a parameter as the parameters of a model.

    Args:
        weight: The parameter.
        whole: A value of its shape.
        is_stacked: Whether the model has it as it is, or matrix by matrix.

    Yields:
        Name in the layer, first element, and value of each parameter.
    """
    if is_stacked or len(weight.shape) == 2:
        yield weight.name, 0, whole
        return
    size = weight.shape[1] * weight.shape[2]
    for number in range(weight.shape[0]):
        yield f"{weight.name}_{number}", number * size, whole[number]


def initial(weight: Weight) -> torch.Tensor:
    """The weight before the first step.

    Args:
        weight: Whose.

    Returns:
        Its whole value, float32.
    """
    value: torch.Tensor = _random(weight, -1) * float(weight.shape[-1]) ** -0.5
    return value


def gradient(weight: Weight, step: int) -> torch.Tensor:
    """The whole gradient, already reduced over all ranks: the same everywhere.

    Args:
        weight: Whose.
        step: Counted from 0.

    Returns:
        Its whole value, float32.
    """
    value: torch.Tensor = _random(weight, step) * 1e-2
    return value


def _random(weight: Weight, step: int) -> torch.Tensor:
    seed = zlib.crc32(f"{weight.full_name} {step} {_SEED}".encode())
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))


def least_bytes(weight: Weight, num_shards: int) -> float:
    """Bytes that a rank must send so that a float32 parameter cut into equal runs of rows is orthogonalised.

    The least of two ways: rows to one owner and result rows back, or the Gram matrices of all shards
    added up everywhere. Nothing, where the shards are whole matrices.

    Args:
        weight: The parameter.
        num_shards: Ranks that it is sharded over.

    Returns:
        Bytes, a mean over the ranks.
    """
    if num_shards == 1 or weight.num_matrices % num_shards == 0:
        return 0.0
    rows, columns = weight.shape[-2:]
    others = (num_shards - 1) / num_shards
    owner = 2 * rows * columns * others / num_shards
    gram = 2 * columns**2 * others if columns <= rows else owner
    return 4.0 * weight.num_matrices * min(owner, gram)
