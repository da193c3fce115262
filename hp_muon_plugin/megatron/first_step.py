"""Does an optimizer update what is trained? Looked at once, in its first step.

A trainer that builds its optimizer over other model chunks than those that it trains, over some of them, or over a
model that it wraps or builds again afterwards would go on without a word: the loss is computed with weights that
nobody changes.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hp_muon_plugin.errors import HookError
from hp_muon_plugin.muon.gradients import listed

logger = logging.getLogger(__name__)


class Trained:
    """Model chunks that were wrapped to be trained, and parameters that some optimizer updates. Keeps none alive."""

    def __init__(self) -> None:
        self._chunks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._updated: Any = WeakTensorKeyDictionary()

    def note_wrapped(self, chunk: torch.nn.Module) -> None:
        """Remember a chunk.

        Args:
            chunk: Wrapped.
        """
        self._chunks.add(chunk)

    def note_updated(self, params: Iterable[torch.Tensor]) -> None:
        """Remember what an optimizer updates.

        Args:
            params: The model's parameters or shards.
        """
        for param in params:
            self._updated[param] = True

    def left_out(self, chunk: torch.nn.Module) -> list[str]:
        """Parameters of a chunk that no optimizer updates.

        Args:
            chunk: Wrapped.

        Returns:
            Names of those that require a gradient and have a buffer for it.
        """
        return [name for name, _ in self._left_out(chunk)]

    def left_out_now(self) -> list[str]:
        """The same of all chunks, of those parameters whose gradient is not zero: they took part in this step."""
        return [name for chunk in self._chunks for name, param in self._left_out(chunk) if _has_gradient(param)]

    def _left_out(self, chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in trainable(chunk):
            if param not in self._updated and hasattr(param, "main_grad"):
                yield name, param


def trainable(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Trainable parameters of a wrapped chunk as optimizers see them.

    Args:
        chunk: In Megatron's wrapper or in ours.

    Yields:
        Name and parameter, or name and shard.
    """
    own: Any = getattr(chunk, "sharded", None)
    names = {param: name for name, param in chunk.named_parameters()}
    if own is None:
        yield from ((name, param) for param, name in names.items() if param.requires_grad)
        return
    for _, parameter in own():  # registered is the one or the other
        name = names.get(parameter.sharded) or names.get(parameter.full, parameter.name)
        if parameter.sharded.requires_grad:
            yield name, parameter.sharded


def noting_init(original: Callable[..., None], note: Callable[[Any], None]) -> Callable[..., None]:
    """A constructor that tells of what it made.

    Args:
        original: Megatron's.
        note: Called with every object.

    Returns:
        The constructor.
    """

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    return init


class FirstStep:
    """Watches the chunks of an optimizer until its first step.

    Args:
        chunks: Wrapped model chunks that it updates.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.trained: Trained | None = None
        """What else is trained here; None where the plugin is not installed."""
        self.is_strict = True
        """Whether a fault is an error, or a line in the log."""
        self._chunks = [chunk for chunk in chunks if any(True for _ in trainable(chunk))]
        self._ran: set[int] = set()
        self._handles = [
            _model(chunk).register_forward_pre_hook(functools.partial(_note, self._ran, index))
            for index, chunk in enumerate(self._chunks)
        ]

    def faults(self) -> list[str]:
        """What is wrong on this rank, once: the chunks are let go of.

        Read by the host for chunks that no forward pass went through, and for parameters that nobody updates.

        Returns:
            Whole messages; none later, and none if a fault is no error.
        """
        chunks, self._chunks = self._chunks, []
        for handle in self._handles:
            handle.remove()
        idle = [
            f"model chunk {index} ({type(_model(chunk)).__name__})"
            for index, chunk in enumerate(chunks)
            if index not in self._ran and not any(_has_gradient(param) for _, param in trainable(chunk))
        ]
        found = [_IDLE.format(listed(idle))] if idle else []
        left_out = self.trained.left_out_now() if self.trained is not None and chunks else []
        found += [LEFT_OUT.format(listed(left_out))] if left_out else []
        if self.is_strict:
            return found
        for message in found:
            logger.warning("%s", message)
        return []


def first_step_error(faults: Sequence[str]) -> HookError:
    """The error of a first step.

    Args:
        faults: Of this rank; empty where only another rank has one.

    Returns:
        The error.
    """
    return HookError("\n".join(faults) or _IDLE.format("a model chunk of another rank"))


_FIX = (
    "\n  fix: wrap the model once, give the optimizer's factory every chunk that the wrapper (or get_model) returned, "
    "and train these; "
)
_IDLE = (
    "{}: belongs to this optimizer and took no part in its first step, so that something else is trained"
    + _FIX
    + "install(strict=False) goes on without this check"
)
LEFT_OUT = (
    "{}: is trained, and belongs to no optimizer, so that it would keep its first value"
    + _FIX
    + "install(strict=False) if something that is no optimizer of Megatron's updates it"
)


def _model(chunk: torch.nn.Module) -> torch.nn.Module:
    from hp_muon_plugin.megatron.units import innermost

    return innermost(chunk)


def _note(ran: set[int], index: int, *unused: Any) -> None:
    ran.add(index)


def _has_gradient(param: torch.Tensor) -> bool:
    grad = getattr(param, "main_grad", None)
    return grad is not None and bool(torch.count_nonzero(grad))
