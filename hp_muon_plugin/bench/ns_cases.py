"""Cases of the Newton-Schulz benchmark, and how they are written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hp_muon_plugin.errors import ConfigError

_PATTERN = re.compile(r"(\[)?\s*(?:(\d+)\s*[x,])?\s*(\d+)\s*[x,]\s*(\d+)\s*(?(1)\])(\+update)?")


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one shape.

    Attributes:
        each: ``(rows, cols)`` each.
        whole: ``(count, rows, cols)`` that they are views of, if the case is a stack.
    """

    each: list[torch.Tensor]
    whole: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Matrices of one shape.

    Attributes:
        count: Matrices.
        rows: Rows of each.
        cols: Columns of each.
        is_stack: Whether they are one three-dimensional tensor, as experts are, or separate ones.
        has_update: Whether weights are decayed and updated too.
    """

    count: int
    rows: int
    cols: int
    is_stack: bool = False
    has_update: bool = False

    def __str__(self) -> str:
        update = "+update" if self.has_update else ""
        if self.is_stack:
            return f"[{self.count},{self.rows},{self.cols}]{update}"
        return ("" if self.count == 1 else f"{self.count}x") + f"{self.rows}x{self.cols}{update}"

    @property
    def short(self) -> int:
        """Short side."""
        return min(self.rows, self.cols)

    @property
    def long(self) -> int:
        """Long side."""
        return max(self.rows, self.cols)

    @property
    def numel(self) -> int:
        """Elements of all matrices."""
        return self.count * self.rows * self.cols

    def matrices(self, device: torch.device, seed: int = 0) -> Matrices:
        """Gaussian matrices.

        Args:
            device: Where.
            seed: Of the generator.

        Returns:
            Separate matrices, or views of one tensor if the case is a stack.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.is_stack:
            whole = torch.randn(self.count, self.rows, self.cols, generator=generator).to(device)
            return Matrices(list(whole), whole)
        return Matrices([torch.randn(self.rows, self.cols, generator=generator).to(device) for _ in range(self.count)])


def parse_case(text: str, option: str) -> Case:
    """Read a case as its name is written.

    Args:
        text: ``74x24x10240`` (separate matrices), ``[32,24,10240]`` (one tensor), ``1024x4096`` (one
            matrix), each with ``+update`` if weights are updated too.
        option: Named in the error.

    Returns:
        The case.

    Raises:
        ConfigError: If it cannot be read.
    """
    found = _PATTERN.fullmatch(text.strip())
    if not found or not all(int(number) for number in found.groups()[1:4] if number):
        raise ConfigError(
            option, text, "is no shape", "write 74x24x10240, [32,24,10240] or 1024x4096, with +update if you like"
        )
    bracket, count, rows, cols, update = found.groups()
    return Case(int(count or 1), int(rows), int(cols), bool(bracket), bool(update))


def read_cases(path: Path) -> list[Case]:
    """Read a file with one case per line; empty lines and ``#`` comments are left out.

    Args:
        path: The file.

    Returns:
        The cases, in order.

    Raises:
        ConfigError: If there is no such file, nothing in it, or a line cannot be read.
    """
    if not path.is_file():
        raise ConfigError("--shapes", path, "there is no such file", "give a text file with one shape per line")
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    cases = [parse_case(line, f"--shapes {path}") for line in lines if line]
    if not cases:
        raise ConfigError("--shapes", path, "there is no shape in it", "write one shape per line, such as 74x24x10240")
    return cases


MISSION: Sequence[Case] = tuple(
    parse_case(text, "built-in")
    for text in (
        "74x24x10240",
        "74x10240x24",
        "[32,24,10240]",
        "74x24x10240+update",
        "[32,24,10240]+update",
        "[48,128,2048]",
        "64x128x128",
        "16x256x256",
        "16x256x1024",
        "4x512x512",
        "1024x1024",
        "1024x2048",
        "1024x4096",
        "2048x2048",
        "2048x5120",
    )
)
