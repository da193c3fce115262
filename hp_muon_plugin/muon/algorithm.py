"""Which form of the iteration is fastest where: a table by short side, aspect and device.

The rows are measured, not derived: ``hp-muon bench newton-schulz --calibrate`` measures them again on
the machine at hand and writes a file that :func:`~hp_muon_plugin.muon.rule_file.load_table` reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.runs import BFLOAT16, FLOAT16, IEEE_FLOAT32, GramPrecision, segments


class Form(StrEnum):
    """How the steps are computed."""

    gram = "gram"
    standard = "standard"


_PRECISIONS = {
    FloatDtype.float32: IEEE_FLOAT32,
    FloatDtype.float16: FLOAT16,
    FloatDtype.bfloat16: BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to compute the iteration.

    Attributes:
        form: Gram runs as long as precision allows, or the standard iteration step by step.
        num_blocks: Block rows of symmetric products; 1 computes every entry.
        dtype: Type of the products. float16 and bfloat16 work on exactly scaled copies.
        has_kernel: Symmetric products by one Triton kernel each, where Triton is installed.
        shared_blocks: Block rows where several threads share a product; they meet at the end of each,
            so that fewer and larger ones win. 0: as many as with one thread.
    """

    form: Form
    num_blocks: int = 1
    dtype: FloatDtype = FloatDtype.float32
    has_kernel: bool = False
    shared_blocks: int = 0

    def __str__(self) -> str:
        shared = f" ({self.shared_blocks} with several threads)" if self.shared_blocks else ""
        blocks = f", symmetric in {self.num_blocks} block rows{shared}" if self.num_blocks > 1 else ""
        blocks = ", symmetric in one kernel" if self.has_kernel else blocks
        return f"{self.form} {self.dtype}{blocks}"

    @property
    def precision(self) -> GramPrecision:
        """Precision of the Gram matrices, float32 being IEEE."""
        return _PRECISIONS[self.dtype]

    def blocks(self, num_threads: int) -> int:
        """Block rows of symmetric products.

        Args:
            num_threads: Threads of a product.

        Returns:
            :attr:`num_blocks`, or :attr:`shared_blocks` where several threads share a product.
        """
        return self.shared_blocks if self.shared_blocks and num_threads > 1 else self.num_blocks

    def run_lengths(self, coefficients: Sequence[Coefficients]) -> tuple[int, ...]:
        """Steps of each run, float32 being IEEE.

        Args:
            coefficients: ``(a, b, c)`` of every step.

        Returns:
            Lengths of the runs.
        """
        if self.form is Form.standard:
            return (1,) * len(coefficients)
        return tuple(len(run) for run in segments(coefficients, self.precision))

    def flops(self, short: int, long: int, run_lengths: Sequence[int], *, padded: int | None = None) -> int:
        """Floating-point operations for one matrix.

        Args:
            short: Short side ``m``.
            long: Long side ``n``.
            run_lengths: Steps of each run; the standard form has runs of one step.
            padded: Side to which its small matrices are padded.

        Returns:
            Per run ``4 m^2 n`` to form and apply, and ``2 m^3`` for each small product: one per
            step for the square, and three more for each step after the first. Symmetric products
            cost ``(k + 1) / 2k`` of that, or half in one kernel; applying costs ``2 m^2 n`` in full.
        """
        share = 0.5 if self.has_kernel else (self.num_blocks + 1) / (2 * self.num_blocks)
        total, side = 0.0, padded or short
        for steps in run_lengths:
            small = steps + 3 * (steps - 1)
            total += share * (2 * short**2 * long + small * 2 * side**3) + 2 * short**2 * long
        return round(total)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table; the first that fits decides.

    Attributes:
        device: ``cpu``, ``cuda``, ``npu``.
        short_below: Fits short sides smaller than this.
        aspect_from: Fits ``long / short`` of at least this.
        algorithm: What to use.
        asked: The type of products that must be asked for (``optimizer.ns_dtype``) for the row to fit; None
            for rows that decide where none is.
    """

    device: str
    short_below: int
    aspect_from: float
    algorithm: Algorithm
    asked: FloatDtype | None = None

    def fits(self, device: str, short: int, long: int) -> bool:
        """Whether the row is for a shape on a device."""
        return self.device == device and short < self.short_below and long >= self.aspect_from * short


_ANY = 1 << 62
_BF16 = FloatDtype.bfloat16

# Below 12 a single direction that float32 Gram matrices lose (singular values below 2.4e-4 of the norm)
# weighs more than 1.5e-3 of the result: the standard form, which costs little there.
# CPU rows: measured on 2 cores of an AMD EPYC (Zen 4), torch 2.13, float32; docs/benchmarks has the runs.
# bfloat16 on the CPU is not chosen there: it is a thousand times less accurate. Where it is asked for, float32 is taken
# all the same for short sides below 39 and for long rows: it is faster there as well.
# CUDA and NPU rows: not run on hardware. They follow the operation counts: small matrices are bound by
# launches and bandwidth, where the Gram form needs fewest of both; large ones are bound by arithmetic,
# and float16 after exact scaling is 4 to 9 times as accurate as bfloat16 at the same rate.
TABLE: tuple[Rule, ...] = (
    Rule("cpu", 12, 1.0, Algorithm(Form.standard)),
    Rule("cpu", 20, 4.0, Algorithm(Form.gram)),
    Rule("cpu", 20, 1.0, Algorithm(Form.standard)),
    Rule("cpu", 181, 2.0, Algorithm(Form.gram)),
    Rule("cpu", 181, 1.0, Algorithm(Form.standard)),
    Rule("cpu", 362, 2.0, Algorithm(Form.gram, 4, shared_blocks=1)),
    Rule("cpu", 362, 1.0, Algorithm(Form.standard, 4, shared_blocks=1)),
    Rule("cpu", 724, 1.5, Algorithm(Form.gram, 8, shared_blocks=2)),
    Rule("cpu", 724, 1.0, Algorithm(Form.standard, 8, shared_blocks=2)),
    Rule("cpu", _ANY, 1.5, Algorithm(Form.gram, 16)),
    Rule("cpu", _ANY, 1.0, Algorithm(Form.standard, 16)),
    Rule("cpu", 12, 1.0, Algorithm(Form.standard), _BF16),
    Rule("cpu", 39, 4.0, Algorithm(Form.gram), _BF16),
    Rule("cpu", 39, 1.0, Algorithm(Form.standard), _BF16),
    Rule("cpu", 181, 16.0, Algorithm(Form.gram), _BF16),
    Rule("cpu", 362, 16.0, Algorithm(Form.gram, 4, shared_blocks=1), _BF16),
    Rule("cpu", 270, 2.0, Algorithm(Form.gram, dtype=_BF16), _BF16),
    Rule("cpu", 405, 4.0, Algorithm(Form.gram, 2, _BF16), _BF16),
    Rule("cpu", 405, 2.0, Algorithm(Form.gram, dtype=_BF16), _BF16),
    Rule("cpu", 405, 1.0, Algorithm(Form.standard, dtype=_BF16), _BF16),
    Rule("cpu", 724, 1.5, Algorithm(Form.gram, 4, _BF16), _BF16),
    Rule("cpu", 724, 1.0, Algorithm(Form.standard, 4, _BF16), _BF16),
    Rule("cpu", _ANY, 1.5, Algorithm(Form.gram, 8, _BF16), _BF16),
    Rule("cpu", _ANY, 1.0, Algorithm(Form.standard, 8, _BF16), _BF16),
    Rule("cuda", 12, 1.0, Algorithm(Form.standard)),
    Rule("cuda", 257, 1.0, Algorithm(Form.gram)),
    Rule("cuda", _ANY, 1.0, Algorithm(Form.gram, dtype=FloatDtype.float16, has_kernel=True)),
    Rule("npu", 12, 1.0, Algorithm(Form.standard)),
    Rule("npu", 257, 1.0, Algorithm(Form.gram)),
    Rule("npu", _ANY, 1.5, Algorithm(Form.gram, dtype=FloatDtype.float16)),
    Rule("npu", _ANY, 1.0, Algorithm(Form.standard, dtype=FloatDtype.float16)),
)


def choose(
    device: str, short: int, long: int, *, table: Sequence[Rule] = TABLE, dtype: FloatDtype | None = None
) -> Algorithm:
    """The algorithm for matrices of a shape.

    Args:
        device: ``cpu``, ``cuda``, ``npu``; anything else is treated as ``cuda``.
        short: Short side.
        long: Long side; for a group of different long sides the shortest of them.
        table: Rows, the first that fits decides.
        dtype: Type of the products that is asked for; None leaves it to the table.

    Returns:
        The algorithm: of a row for the type that is asked for, which may have found a more accurate one to be
        faster. Where the table has no such row, it is what the table has for the shape, in that type.
    """
    known = device if device in ("cpu", "npu") else "cuda"
    fitting = [rule for rule in table if rule.fits(known, short, long)]
    if dtype is not None:
        for rule in fitting:
            if rule.asked is dtype:
                return rule.algorithm
    found = next(rule.algorithm for rule in fitting if rule.asked is None)
    if dtype is None or dtype is found.dtype:
        return found
    if known == "cpu":  # blocks were measured in another type
        return Algorithm(found.form, dtype=dtype)
    return replace(found, dtype=dtype)


# Accelerators run a batch in about the time of one launch per product, so that matrices of nearly the
# same short side had better share one; tiles there are at least 16 wide. On the CPU zeros cost time.
_PADDED_TO = {"cpu": ()}
_PADDED_TO_ELSEWHERE = (32, 16)
_PADDING_COSTS_AT_MOST = 0.1


def padded_short(device: str, algorithm: Algorithm, short: int, long: int) -> int:
    """Side of the small matrices in which a matrix is worked on together with slightly smaller ones.

    Args:
        device: ``cpu``, ``cuda``, ``npu``.
        algorithm: How it is worked on.
        short: Short side.
        long: Long side.

    Returns:
        ``short``, or the next multiple of 32 or 16 where that adds less than a tenth of the
        operations of a five-step schedule on one Gram matrix.
    """
    own = algorithm.flops(short, long, (5,))
    for multiple in _PADDED_TO.get(device, _PADDED_TO_ELSEWHERE):
        side = -(-short // multiple) * multiple
        if algorithm.flops(short, long, (5,), padded=side) <= (1 + _PADDING_COSTS_AT_MOST) * own:
            return side
    return short


# Separate matrices: a call costs this much besides its products, and more where threads meet at its end
# (on a machine that does nothing else; on a busy one they wait a hundred times as long). Measured, as TABLE is.
_CALL_S = 3.5e-6
_MEETING_S = 10e-6
_COPY_BYTES_PER_S = 25e9  # in the cache, read and written bytes together


def is_gathered(device: str, rows: int, cols: int, *, num_threads: int) -> bool:
    """Whether separate float32 matrices of a shape are copied into one tensor before the first product.

    It depends on nothing else, so that a matrix has the same result in any company.

    Args:
        device: ``cpu``, ``cuda``, ``npu``.
        rows: Rows.
        cols: Columns.
        num_threads: Threads of a product.

    Returns:
        Whether a copy takes less time than the two calls that it saves for each matrix, for its Gram
        matrix and for the first application. Elsewhere than on the CPU they always come as one tensor.
    """
    call_s = _CALL_S + (_MEETING_S if num_threads > 1 else 0.0)
    return device == "cpu" and 2 * 4 * rows * cols / _COPY_BYTES_PER_S < 2 * call_s
