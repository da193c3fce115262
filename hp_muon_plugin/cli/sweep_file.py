"""``multirun.yaml``, which Hydra writes before it looks at any job of a sweep.

It stays where a run begins. A sweep of refused jobs or of plans leaves the folder as it was, with the file of an
earlier sweep. Hydra asks for the folder right before it writes; ``conf/`` has it ask through a resolver.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from hp_muon_plugin.config.store import SWEEP_FOLDER, same_folder

_NAME = "multirun.yaml"


class SweepFile:
    """The file of the sweep that this process runs, if it runs one."""

    def __init__(self) -> None:
        self._is_kept = False
        self._before: dict[Path, bytes | None] = {}
        self._new_folders: list[Path] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, what is written is taken back at the end, unless :meth:`keep` was called."""
        self._is_kept, self._before, self._new_folders = False, {}, []
        OmegaConf.register_new_resolver(SWEEP_FOLDER, self._note, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_new_resolver(SWEEP_FOLDER, same_folder, replace=True)
            if not self._is_kept:
                self._take_back()

    def keep(self) -> None:
        """A run begins."""
        self._is_kept = True

    def _note(self, folder: str) -> str:
        path = Path(folder).absolute()
        if path not in self._before:
            with contextlib.suppress(OSError):
                self._before[path] = _content(path / _NAME)
                self._new_folders += [place for place in (path, *path.parents) if not place.exists()]
        return folder

    def _take_back(self) -> None:
        for folder, content in self._before.items():
            with contextlib.suppress(OSError):
                if content is None:
                    (folder / _NAME).unlink(missing_ok=True)
                elif _content(folder / _NAME) != content:
                    (folder / _NAME).write_bytes(content)
        for folder in self._new_folders:  # the innermost first
            with contextlib.suppress(OSError):  # somebody else's by now
                folder.rmdir()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


sweep_file = SweepFile()
"""Of this process: Hydra gives its resolvers no other place to keep it."""
