"""``hp-muon``: train, bench, doctor."""

import sys
from collections.abc import Callable, Sequence

import hp_muon_plugin

_USAGE = """usage: hp-muon COMMAND ...

  train [OVERRIDE ...]   train a megatron-core GPT; Hydra overrides such as
                         optimizer=adamw model=tiny_dense topology.ranks=2 run.steps=100
                         --dry-run prints the plan and stops; --cfg job, --info and -m are Hydra's
  bench newton-schulz    polar factors: ours against peers, with the machine's floor; --help lists options
  doctor                 versions, platform, hooks, and what would not work and why
  --version              print the version
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``hp-muon``.

    Args:
        arguments: Command-line arguments; None takes those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        sys.exit(0 if given else 2)
    if given[0] == "--version":
        print(hp_muon_plugin.__version__)
        return
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "bench": _bench, "doctor": _doctor}
    if given[0] not in commands:
        print(f"hp-muon: no command {given[0]!r}; commands are {', '.join(commands)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(commands[given[0]](given[1:]))


def _train(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.train import run

    return run(arguments)


def _bench(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.bench import run

    return run(arguments)


def _doctor(arguments: list[str]) -> int:
    from hp_muon_plugin.cli.doctor import run

    return run(arguments)


if __name__ == "__main__":
    main()
