"""What a shell script asks torchrun for."""

import os
import subprocess
from pathlib import Path


def asked_of_torchrun(script: Path, folder: Path, *arguments: str, **variables: str) -> list[str]:
    """Run a script with a torchrun that prints its arguments, a line each, and then its variables for HCCL."""
    torchrun = folder / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nenv | grep HCCL\n", encoding="utf-8")
    torchrun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        [str(script), *arguments], capture_output=True, text=True, env=environment, cwd=folder, check=True
    )
    return done.stdout.splitlines()
