"""Whether the ranks of a job can be laid out as the script's arguments say: told before Megatron asserts it on each."""

import math
from collections.abc import Iterator, Sequence

from hp_muon_plugin.cli.script_line import value_of
from hp_muon_plugin.config.script import Choice
from hp_muon_plugin.config.topology_checks import divisors
from hp_muon_plugin.errors import ConfigError, raise_all

_TP, _PP, _CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
_EP, _ETP, _EXPERTS = "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--num-experts"
_ELSEWHERE = ("--yaml-cfg", "--use-checkpoint-args")
"""With these the sizes are not on the line alone."""


def check_ranks(arguments: Sequence[str], choice: Choice, num_ranks: int, *, is_alone: bool) -> None:
    """Check parallel sizes and replicas against the ranks.

    Args:
        arguments: The script's arguments as given.
        choice: The plugin's options.
        num_ranks: Ranks of the job.
        is_alone: Whether nobody started this process as a rank.

    Raises:
        ConfigError: If the sizes do not divide the ranks, or the replicas the data-parallel ones.
        ConfigErrors: If several do not.
    """
    if any(value_of(arguments, flag) is not None or flag in arguments for flag in _ELSEWHERE):
        return
    raise_all(list(_errors(arguments, choice, num_ranks, is_alone)))


def _errors(arguments: Sequence[str], choice: Choice, num_ranks: int, is_alone: bool) -> Iterator[ConfigError]:
    sizes = {flag: _size(arguments, flag) for flag in (_TP, _PP, _CP)}
    experts = {_EP: _size(arguments, _EP), _ETP: _size(arguments, _ETP, sizes[_TP]), _PP: sizes[_PP]}
    wrong = [error for given in (sizes, experts) for error in _undivided(given, num_ranks, is_alone)]
    yield from wrong[:1]
    if wrong or choice.data_parallel is None:
        return
    replicas = choice.data_parallel.replicas
    kinds = [("data-parallel ranks", sizes)]
    if value_of(arguments, _EXPERTS) is not None and experts != {_EP: 1, _ETP: sizes[_TP], _PP: sizes[_PP]}:
        kinds.append(("ranks that hold the same experts", experts))
    for what, given in kinds:
        count = num_ranks // math.prod(given.values())
        if count % replicas:
            yield ConfigError(
                "--hp-fsdp-replicas",
                replicas,
                f"the {count} {what} cannot be split into {replicas} equal replicas",
                f"choose among {divisors(count)} (--hp-dp hp_fsdp has one)",
            )


def _undivided(given: dict[str, int], num_ranks: int, is_alone: bool) -> Iterator[ConfigError]:
    product = math.prod(given.values())
    if num_ranks % product == 0:
        return
    flag = max(given, key=lambda name: given[name])
    named = " and ".join(f"{name} {size}" for name, size in given.items() if size > 1)
    if is_alone:
        why = f"needs {product} ranks or a multiple of them, and without torchrun a script is a job of one rank"
        fix = f"torchrun --nproc-per-node {product} -m hp_muon_plugin.run ..."
    else:
        why = f"{num_ranks} ranks cannot be split into groups of {product} ({named})"
        fix = f"start a multiple of {product} ranks, or choose sizes whose product is among {divisors(num_ranks)}"
    yield ConfigError(flag, given[flag], why, fix)


def _size(arguments: Sequence[str], flag: str, default: int = 1) -> int:
    """A parallel size; the default where none is given, or one that Megatron's parser refuses."""
    value = value_of(arguments, flag)
    return int(value) if value is not None and value.isascii() and value.isdigit() and int(value) > 0 else default
