"""``python -m hp_muon_plugin.run SCRIPT.py ARGUMENT ...``: a Megatron-LM script with the plugin.

What it takes is in docs/megatron_run.md, and in ``--help``.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point.

    Args:
        arguments: The script, its arguments and options of the plugin; None takes those of the process.
    """
    from hp_muon_plugin.cli.script import run

    code = run(sys.argv[1:] if arguments is None else arguments)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
