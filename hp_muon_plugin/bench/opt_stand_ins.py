"""Stand-ins for what peers import and a CPU has not, so that their own code runs as it is installed."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class _Anything:
    """Decorates, is called, is subscripted and has every attribute, to no effect."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_decorator = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if is_decorator else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


@contextlib.contextmanager
def stand_in_for_triton() -> Iterator[None]:
    """Kernels are defined with triton while a library is imported; a CPU never runs them.

    It goes again, since torch takes what it finds for the real one.
    """
    names = [] if importlib.util.find_spec("triton") else ["triton", "triton.language"]
    torch.compile(len)  # torch looks for triton now, and finds none
    for name in names:
        sys.modules[name] = _Module(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def bare_packages(*names: str) -> None:
    """Let submodules be imported without what their packages import on the way.

    Args:
        names: Dotted names of installed packages, parents first.
    """
    for name in names:
        if name in sys.modules:
            continue
        top, _, rest = name.partition(".")
        spec = importlib.util.find_spec(top) if not rest else None
        parent = sys.modules.get(name.rpartition(".")[0])
        folders = spec.submodule_search_locations if spec else parent.__path__ if parent else []
        module = ModuleType(name)
        module.__path__ = [str(Path(folder) / name.rpartition(".")[2]) if rest else folder for folder in folders or []]
        sys.modules[name] = module


class _Stream:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Nothing to keep."""

    def record(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""


class _Proxy(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def dist_with_uneven_lists() -> Any:
    """torch.distributed whose ``all_to_all`` takes lists of tensors of any sizes, which gloo refuses.

    Returns:
        What a module may take for torch.distributed.
    """

    def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
        received = torch.empty(sum(t.numel() for t in outputs), dtype=outputs[0].dtype)
        sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]
        sent = torch.cat([t.reshape(-1) for t in inputs])
        dist.all_to_all_single(received, sent, *sizes, group=group)  # the library's own exchange, in one buffer
        for output, part in zip(outputs, torch.split(received, sizes[0]), strict=True):
            output.copy_(part.view(output.shape))

    return _Proxy(dist, all_to_all=all_to_all)


def torch_with_uneven_gathers() -> Any:
    """torch whose ``distributed.all_gather`` takes lists of tensors of any sizes, as NCCL does and gloo does not.

    Returns:
        What a module may take for torch.
    """

    def all_gather(outputs: list[torch.Tensor], source: torch.Tensor, group: Any = None) -> None:
        for place, output in enumerate(outputs):  # the library's own exchange, one broadcast for each rank as NCCL's
            if output.numel():
                tensor = source if place == dist.get_rank(group) else output
                dist.broadcast(tensor, dist.get_global_rank(group, place), group=group)

    return _Proxy(torch, distributed=_Proxy(dist, all_gather=all_gather))


def torch_with_streams() -> Any:
    """torch, but for a CPU that has streams and events.

    Returns:
        What a module may take for torch.
    """
    now = _Stream()

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    handle = SimpleNamespace(Stream=_Stream, Event=_Stream, stream=stream, current_stream=lambda *_: now)

    return _Proxy(torch, get_device_module=lambda *_: handle)
