"""Options of MindSpeed that change what the plugin takes the place of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clash:
    """An option of MindSpeed that does not go with the plugin.

    Attributes:
        flag: As it is written.
        value: The value that does not go with it; None: any.
        sharded_only: Whether it goes with Megatron's own data parallelism.
        why: What would happen.
        fix: What to do.
    """

    flag: str
    value: str | None
    sharded_only: bool
    why: str
    fix: str


_OWN_STATE = "leave it out; optimizer.momentum_dtype=bfloat16 and dp=hp_fsdp make the state smaller"
_OWN_PASS = "leave it out, or take dp=megatron_ddp"  # noqa: S105  # no password

CLASHES: tuple[Clash, ...] = (
    Clash("--swap-optimizer", None, False, "swaps the state of Megatron's optimizers, not the plugin's", _OWN_STATE),
    Clash("--virtual-optimizer", None, False, "swaps the state of MindSpeed's AdamW, not the plugin's", _OWN_STATE),
    Clash("--quant-states", None, False, "quantises the state of Megatron's optimizers, not the plugin's", _OWN_STATE),
    Clash(
        "--quant-grads", None, False, "makes gradients float16, which only MindSpeed's optimizers scale", "leave it out"
    ),
    Clash(
        "--reuse-fp32-param",
        None,
        False,
        "keeps weights and float32 masters in one buffer, which only Megatron's optimizers take apart",
        "leave it out; dp=hp_fsdp divides the masters over the ranks",
    ),
    Clash(
        "--optimizer-selection",
        "fused_ema_adamw",
        False,
        "keeps an average of weights in MindSpeed's AdamW, which the plugin takes the place of",
        "leave it out",
    ),
    Clash(
        "--enable-high-availability",
        None,
        False,
        "makes replicas of the state of Megatron's optimizers, not of the plugin's",
        "leave it out; checkpoints of the plugin are resumed at any number of ranks",
    ),
    Clash(
        "--layerzero", None, False, "shards weights in a way that cuts matrices", "leave it out, and take dp=hp_fsdp"
    ),
    Clash(
        "--moe-fb-overlap",
        None,
        True,
        "runs forward and backward of layers piece by piece, past the modules that gather their weights",
        _OWN_PASS,
    ),
    Clash("--schedules-method", "dualpipev", True, "runs layers past the modules that gather their weights", _OWN_PASS),
)
