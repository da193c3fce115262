"""Commands that are forked from a process which has imported the command line, and nothing else.

Starting an interpreter and importing Hydra is more than half of what a refused command or a dry run costs. ``main()``
runs in a process of its own all the same, with the arguments, the folder, the environment and the output that it was
given, and ends as any process does; ranks are started by it as by any launcher. Variables that are read while Python or
a library is loaded need a process that is not forked.

Run as a file this is the process that forks.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

READ_BY_US = ("HP_MUON_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")
"""Beginnings of variables that our code reads when it runs, and nobody while it is loaded."""
_LIMIT = 1 << 20


class Zygote:
    """Starts commands, one at a time."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads are lost by a fork
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=one_thread)
        theirs.close()

    def run(
        self, arguments: list[str], *, folder: Path, timeout: float, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = {"arguments": arguments, "folder": str(folder), "environment": {**os.environ, **environment}}
            socket.send_fds(self._line, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
            pid = int(self._answer(timeout))
            try:
                code = int(self._answer(timeout))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._answer(timeout)
                raise subprocess.TimeoutExpired(arguments, timeout) from None
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def _answer(self, timeout: float) -> bytes:
        self._line.settimeout(timeout)
        answer = self._line.recv(_LIMIT)
        assert answer, "the process that forks commands has ended"
        return answer

    def close(self) -> None:
        self._line.shutdown(socket.SHUT_RDWR)  # what this process has forked may hold it, too
        self._process.wait()


def serve(line: socket.socket) -> list[str] | None:
    """Fork commands until nobody asks for more.

    Returns:
        In the process of a command, its arguments.
    """
    while True:
        data, files, _, _ = socket.recv_fds(line, _LIMIT, 2)
        if not data:
            return None
        assert threading.active_count() == 1
        assert len(os.listdir("/proc/self/task")) == 1
        pid = os.fork()
        if pid == 0:
            line.close()
            return _become(json.loads(data), *files)
        for file in files:
            os.close(file)
        line.send(str(pid).encode())
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: dict[str, Any], out: int, err: int) -> list[str]:
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["folder"]
    return list(request["arguments"])


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    import hp_muon_plugin.cli.main
    import hp_muon_plugin.cli.train

    unexpected = {"torch", "megatron"} & set(sys.modules)
    assert not unexpected, unexpected
    gc.freeze()
    arguments = serve(line)
    if arguments is None:
        return
    sys.argv = [str(hp_muon_plugin.cli.main.__file__), *arguments]
    hp_muon_plugin.cli.main.main()


if __name__ == "__main__":
    main()
