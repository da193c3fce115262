"""The attributes of torch that the stand-in replaces, with the reason for each.

What megatron-core 0.12.1, 0.16.1 and 0.19.2 use of ``torch.cuda`` outside inference was read from
their source; anything else still raises torch's own error.
"""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hp_muon_plugin.platform.patching import Replacement
from hp_muon_plugin.platform.standin.devices import CurrentDevice
from hp_muon_plugin.platform.standin.streams import CpuEvent, CpuStream

_TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_THE_STREAM = CpuStream()
_MEMORY_STATS_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


class _Generators(list[torch.Generator]):
    """``torch.cuda.default_generators``: every index is the CPU's generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def replacements() -> list[Replacement]:
    """Everything to replace in torch, in order."""
    return [*_devices(), *_streams(), *_random(), *_memory(), *_tensors()]


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: value


def _cuda(name: str, make: Callable[[Any], Any], why: str) -> Replacement:
    return Replacement(torch.cuda, name, make, why)


def _devices() -> list[Replacement]:
    properties = SimpleNamespace(name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1)
    why = "asked for by parallel_state, layers and schedules; raises without a driver"
    return [
        _cuda("current_device", _returns(CurrentDevice()), "device=torch.cuda.current_device() stands in every layer"),
        _cuda("set_device", _returns(None), why),
        _cuda("get_device_properties", _returns(properties), why),
        _cuda("get_device_capability", _returns((8, 0)), why),
        _cuda("get_device_name", _returns("cpu"), why),
        _cuda("_lazy_init", _returns(None), "called by random-state code; raises without a driver"),
        _cuda(
            "_lazy_call",
            lambda original: lambda callable, **kwargs: callable(),
            "must run now, not at first use",
        ),
        _cuda("is_current_stream_capturing", _returns(False), "asked for before collectives"),
    ]


def _streams() -> list[Replacement]:
    why = "communication and gradient reduction run on side streams"
    return [
        _cuda("Stream", _constant(CpuStream), why),
        _cuda("Event", _constant(CpuEvent), why),
        _cuda("stream", lambda original: lambda stream: contextlib.nullcontext(stream), why),
        _cuda("set_stream", _returns(None), why),
        _cuda("current_stream", _returns(_THE_STREAM), why),
        _cuda("default_stream", _returns(_THE_STREAM), why),
        _cuda("synchronize", _returns(None), why),
        Replacement(torch.cuda.nvtx, "range_push", _returns(0), "profiling marks; raises without NVTX"),
        Replacement(torch.cuda.nvtx, "range_pop", _returns(0), "profiling marks; raises without NVTX"),
    ]


def _random() -> list[Replacement]:
    def get_state(original: Any) -> Any:
        return lambda *args, **kwargs: torch.default_generator.get_state()

    def set_state(original: Any) -> Any:
        return lambda state, *args, **kwargs: torch.default_generator.set_state(state)

    def seed(original: Any) -> Any:
        return lambda value: torch.default_generator.manual_seed(int(value))

    why = "Megatron's random-state tracker switches the device generator, which is the CPU's here"
    made = {
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": seed,
        "manual_seed_all": seed,
    }
    pairs = [(owner, name, make) for owner in (torch.cuda, torch.cuda.random) for name, make in made.items()]
    return [
        *(Replacement(owner, name, make, why) for owner, name, make in pairs),
        _cuda("default_generators", _constant(_Generators([torch.default_generator])), why),
    ]


def _memory() -> list[Replacement]:
    why = "memory reports of a device that is not there"
    return [
        *(_cuda(name, _returns(0), why) for name in _MEMORY_STATS_ZERO),
        _cuda("memory_stats", _returns({}), why),
        _cuda("mem_get_info", _returns((1 << 34, 1 << 34)), why),
        _cuda("reset_peak_memory_stats", _returns(None), why),
        _cuda("empty_cache", _returns(None), why),
        Replacement(torch.Tensor, "record_stream", _returns(None), "keeps memory alive for a stream; nothing to do"),
        Replacement(torch.Tensor, "pin_memory", lambda original: lambda self, *args, **kwargs: self, "needs a driver"),
    ]


def _tensors() -> list[Replacement]:
    def cuda_type(original: Any) -> Any:
        def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if args or kwargs or not caller.startswith("megatron."):
                return result
            return result.replace("torch.", "torch.cuda.", 1)

        return type_

    def same(original: Any) -> Any:
        return lambda self, *args, **kwargs: self

    types = [
        _cuda(
            f"{name}Tensor",
            _constant(getattr(torch, f"{name}Tensor")),
            "constructors and isinstance checks with torch.cuda.*Tensor",
        )
        for name in _TENSOR_TYPES
    ]
    return [
        *types,
        Replacement(torch.Tensor, "cuda", same, "moves to the device"),
        Replacement(torch.nn.Module, "cuda", same, "moves to the device"),
        Replacement(torch.Tensor, "type", cuda_type, "optimizers compare tensor.type() with 'torch.cuda.*Tensor'"),
    ]
