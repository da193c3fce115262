"""One case on one rank: contenders are judged against unsharded training, then timed step by step in turn."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hp_muon_plugin.bench.fsdp_cases import batch
from hp_muon_plugin.bench.fsdp_contenders import ALONE, Alone, Builder, Contender, Judge, Setting
from hp_muon_plugin.bench.fsdp_traffic import CountCalls, private_interfaces, sent_bytes

JUDGED_STEPS = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 61
_PROBE_BYTES = 8 << 20
_PROBES = 5


@dataclass(slots=True)
class Found:
    """What one rank saw of one contender.

    Attributes:
        error: Largest of the relative errors of losses, gradients and changes of weights, over all ranks.
        cpu: Seconds of each timed step, all threads of this rank.
        wall: Seconds of each timed step.
        calls: Collectives of one step as c10d saw them: name to (calls, bytes).
        counted: Collectives of one step as our engine asked for them: ``kind axis`` to (calls, bytes).
        sent: Bytes that left the node in each timed step, by interface; on its first rank, and on the testbed only.
    """

    error: float | None = None
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    counted: dict[str, tuple[int, int]] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)


def race(
    setting: Setting, builders: Mapping[str, Builder], *, num_tokens: int, seconds: float, nodes: int = 0
) -> dict[str, Found]:
    """Judge, count and time. Every rank of the job calls it.

    Args:
        setting: Case and mesh.
        builders: Contenders by name.
        num_tokens: Tokens per rank and step.
        seconds: About how long to time.
        nodes: Nodes of the testbed, 0 without it.

    Returns:
        By name; work without communication as ``ALONE``.
    """
    found = {name: Found() for name in [*builders, ALONE]}
    running = {}
    judge = _Judgement(setting, num_tokens)
    for name, builder in builders.items():
        running[name] = builder(setting)
        found[name].error = judge.error_of(running[name])
        _count(running[name], batch(dist.get_rank(), 0, num_tokens), found[name])
    del judge
    running[ALONE] = Alone(setting)
    tokens = batch(dist.get_rank(), JUDGED_STEPS, num_tokens)
    steps = {name: (lambda contender=contender: contender.step(tokens)) for name, contender in running.items()}
    for name, shift in _rounds(steps, seconds):
        _time(steps[name], found[name], nodes if shift else 0)
    return found


def _rounds(steps: Mapping[str, Callable[[], object]], seconds: float) -> Iterable[tuple[str, int]]:
    """Who is next: everyone once in each round, each round starting with the next one. The same on all ranks."""
    began = time.perf_counter()
    for step in steps.values():
        step()
    once = torch.tensor(time.perf_counter() - began)
    dist.broadcast(once, 0)  # whole world, one number; blocks: all ranks must agree on the number of rounds
    names = list(steps)
    for number in range(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(seconds / float(once))))):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            yield name, number


def _time(step: Callable[[], object], found: Found, nodes: int) -> None:
    dist.barrier()
    before = {interface: sent_bytes(interface) for interface in private_interfaces(nodes)}
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    found.wall.append(time.perf_counter() - wall)
    dist.barrier()  # what this rank still sends to slower ones is its work too
    found.cpu.append(time.process_time() - cpu)
    for interface, count in before.items():
        after = sent_bytes(interface)
        if count is not None and after is not None:
            found.sent.setdefault(interface, []).append(after - count)


def _count(contender: Contender, tokens: torch.Tensor, found: Found) -> None:
    if contender.counted is not None:
        contender.counted.reset()
    with CountCalls() as counter:
        contender.step(tokens)
    found.calls = {name: (number, counter.calls.num_bytes[name]) for name, number in counter.calls.num_calls.items()}
    if contender.counted is not None:
        for (kind, axis), traffic in contender.counted.counts().items():
            found.counted[f"{kind} {axis}"] = traffic.num_collectives, traffic.num_bytes


class _Judgement:
    """What unsharded training gives on the batches of all ranks."""

    def __init__(self, setting: Setting, num_tokens: int) -> None:
        judge = Judge(setting)
        self._batches = [batch(dist.get_rank(), step, num_tokens) for step in range(JUDGED_STEPS)]
        self._start = {name: weight.clone() for name, _, weight in _inner(judge.weights())}
        self._losses = torch.stack([judge.step(tokens) for tokens in self._batches])
        self._grads = {name: grad.clone() for name, _, grad in _inner(judge.gradients())}
        self._weights = {name: weight for name, _, weight in _inner(judge.weights())}
        self._has_optimizer = setting.has_optimizer

    def error_of(self, contender: Contender) -> float:
        """Train a new contender for as many steps, and compare.

        Args:
            contender: Whose.

        Returns:
            The largest relative error, the same on all ranks.
        """
        losses = torch.stack([contender.step(tokens) for tokens in self._batches])
        errors = [_relative([(losses - self._losses, self._losses)])]
        grads = list(contender.gradients())
        errors.append(self._compare(grads, self._grads, None))
        if self._has_optimizer:
            if contender.counted is not None:  # fully_shard would leave the root gathered, rounded to bf16
                with torch.no_grad():
                    contender.model(self._batches[0])  # weights that another replica updated arrive before a forward
            errors.append(self._compare(list(contender.weights()), self._weights, self._start))
        return max(errors)

    def _compare(
        self,
        parts: list[tuple[str, int, torch.Tensor]],
        wanted: dict[str, torch.Tensor],
        start: dict[str, torch.Tensor] | None,
    ) -> float:
        pairs, seen = [], 0
        for name, first, part in parts:
            want = wanted[name][first : first + part.numel()]
            scale = want if start is None else want - start[name][first : first + part.numel()]
            pairs.append((part - want, scale))
            seen += part.numel()
        covered = torch.tensor(float(seen), dtype=torch.float64)
        dist.all_reduce(covered)  # whole world, one number; blocks
        is_whole = float(covered) >= sum(tensor.numel() for tensor in wanted.values())
        return _relative(pairs) if is_whole else 1.0


def _inner(parts: Iterable[tuple[str, int, torch.Tensor]]) -> Iterable[tuple[str, int, torch.Tensor]]:
    return ((name.removeprefix("inner."), first, part) for name, first, part in parts)


def _relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    sums = torch.zeros(2, dtype=torch.float64)
    for difference, scale in pairs:
        sums += torch.stack([difference.double().square().sum(), scale.double().square().sum()])
    dist.all_reduce(sums)  # whole world, two numbers; blocks
    ratio = float(sums[0] / sums[1]) ** 0.5
    return ratio if ratio == ratio else 1.0  # NaN: as wrong as can be, and still a number in JSON


def measure_link() -> tuple[float, float]:
    """What a rank sends per second to its neighbour while all ranks do. Every rank of the job calls it.

    Returns:
        Bytes per second of CPU time, and of wall time; zeros for a single rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return 0.0, 0.0
    source, target = torch.zeros(_PROBE_BYTES, dtype=torch.uint8), torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
    cpu, wall = [], []
    for _ in range(_PROBES + 1):
        dist.barrier()
        began = time.process_time(), time.perf_counter()
        works = [dist.isend(source, (rank + 1) % size), dist.irecv(target, (rank - 1) % size)]
        for work in works:
            assert work is not None
            work.wait()
        wall.append(time.perf_counter() - began[1])
        dist.barrier()
        cpu.append(time.process_time() - began[0])
    return _PROBE_BYTES / statistics.median(cpu[1:]), _PROBE_BYTES / statistics.median(wall[1:])
