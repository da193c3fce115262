"""Options of ``optimizer=hp_muon`` and ``optimizer=adamw``: the one place where defaults live."""

from dataclasses import dataclass, field

from hp_muon_plugin.config.choices import (
    ClipMode,
    FloatDtype,
    MissingGrad,
    NonFinite,
    ScaleMode,
    Schedule,
    Strategy,
    TensorParallelMode,
)
from hp_muon_plugin.config.ranges import number, numbers


@dataclass
class ScalarAdamW:
    """AdamW for everything that Muon does not take: embeddings, output, router, norms, biases."""

    lr: float | None = number(None, above=0, example=3e-3)
    """Learning rate; null means ``optimizer.lr``, which is right with scale=match_rms_adamw only."""
    betas: list[float] = numbers([0.9, 0.95], least=0, below=1)
    """Decay rates of the first and second moment."""
    eps: float = number(1e-8, above=0)
    """Added to the root of the second moment."""
    weight_decay: float | None = number(None, least=0, example=0.1)
    """Decoupled weight decay; null means ``optimizer.weight_decay``. Norms and biases: always 0."""


@dataclass
class MuonRates:
    """What a rank does in a second: what ``strategy=auto`` chooses by, and plans predict by. Null: a default."""

    measure: bool = False
    """Measure what is null at start, over the ranks and links of each axis, and let all plan by the slowest. Another
    start may then choose, and round, otherwise; and by measured rates the choice is not always the faster one."""
    flops_per_s: float | None = number(None, above=0, example=4e13)
    """Operations of matrix products."""
    bytes_per_s: float | None = number(None, above=0, example=1e11)
    """Bytes that arrive at a rank while all ranks of a group receive."""
    replica_bytes_per_s: float | None = number(None, above=0, example=2.5e10)
    """The same from ranks with the same weights, where these lie in other supernodes; null: as ``bytes_per_s``."""
    message_s: float | None = number(None, least=0, example=2e-5)
    """Seconds that a message takes on top of its bytes."""


@dataclass
class HpMuon:
    """Muon with decoupled weight decay for matrices, AdamW for the rest."""

    _target_: str = "hp_muon_plugin.muon.build_optimizer"
    """For hosts that use ``hydra.utils.instantiate(cfg.optimizer, params=model.named_parameters())``."""
    name: str = "hp_muon"
    """Name by which trainers and checkpoints know this optimizer."""
    lr: float = number(5e-3, above=0)
    """Peak learning rate of the Muon matrices."""
    momentum: float = number(0.95, least=0, below=1)
    """Decay of the moving average ``m = momentum * m + (1 - momentum) * grad``."""
    nesterov: bool = True
    """Use ``momentum * m + (1 - momentum) * grad`` instead of ``m``."""
    weight_decay: float = number(0.1, least=0)
    """Decoupled: each step multiplies the weight by ``1 - lr * weight_decay``, whatever its shape."""
    scale: ScaleMode = ScaleMode.match_rms_adamw
    """Scale of the orthogonal update, from the logical shape of the matrix."""
    scale_factor: float = number(1.0, above=0)
    """Extra factor on top of ``scale``."""
    schedule: Schedule = Schedule.keller
    """Newton-Schulz coefficients by name."""
    steps: int | None = number(None, least=1, most=100, example=5)
    """Newton-Schulz steps; null means as many as the schedule is made for."""
    coefficients: list[list[float]] | None = number(None, example="[[3.4445,-4.775,2.0315]]")
    """Rows ``[a, b, c]`` for ``schedule=custom``."""
    ns_dtype: FloatDtype | None = None
    """Type that Newton-Schulz computes in; null lets the table of algorithms choose: float32 on CPU and for
    matrices with a short side up to 256, float16 above that on CUDA and NPU. Where float32 was measured to be faster
    than bfloat16 (on CPU: short sides below 39, long rows), it is taken for that."""
    ns_table: str | None = None
    """File of measured algorithms, from ``hp-muon bench newton-schulz --calibrate``; null for the built-in table."""
    momentum_dtype: FloatDtype = FloatDtype.float32
    """Type in which momentum is stored."""
    split_qkv: bool = True
    """Orthogonalise the query, key and value parts of a fused projection as separate matrices."""
    split_gate_up: bool = True
    """Orthogonalise gate and up of a gated first MLP layer as separate matrices."""
    per_head: bool = False
    """Orthogonalise every attention head of a projection by itself."""
    strategy: Strategy = Strategy.auto
    """How ranks that hold parts of a matrix orthogonalise it; auto prices all strategies and takes the cheapest."""
    divide_replicas: bool | None = None
    """Whether ranks that hold the same weights divide the matrices and send each other the new weights, instead of
    computing the same updates; null divides what takes longer to compute than to send."""
    overlap_backward: bool = False
    """Begin the exchange of matrices during backward, as soon as their gradients are reduced (HP-FSDP and HP-HSDP).
    Needs gradients that nothing changes after backward, and so no clipping of Muon's."""
    comm_dtype: FloatDtype = FloatDtype.float32
    """Type in which parts of matrices and updates are sent between ranks; Gram matrices are sent in float32."""
    max_peers: int | None = number(None, least=1, example=64)
    """Most ranks that one exchanges all-to-all messages with, where connections are scarce; null: no limit."""
    rates: MuonRates = field(default_factory=MuonRates)
    """What the prices of strategies, and the times that ``hp-muon plan`` predicts, are computed from."""
    tp_mode: TensorParallelMode = TensorParallelMode.duplicated
    """How matrices that are cut over tensor-parallel ranks are orthogonalised (docs/concepts.md): ``duplicated``
    gathers them on every rank, ``distributed`` sums Gram matrices, ``owner`` sends each to one rank and the result
    back; ``blockwise`` takes every rank's slice for a matrix, which is another optimizer."""
    muon_params: list[str] = field(default_factory=list)
    """Shell patterns of parameter names that Muon takes although their role says AdamW."""
    adamw_params: list[str] = field(default_factory=list)
    """Shell patterns of parameter names that AdamW takes although their role says Muon."""
    clip_grad: float = number(1.0, least=0)
    """Largest global gradient norm; larger gradients are scaled down in place, as Megatron does. 0 turns it off.

    An application whose trainer clips already at this norm or a smaller one trains as before; one that clips
    at a larger norm, or not at all, sets 0 here to keep it so.
    """
    clip_mode: ClipMode = ClipMode.all
    """Which gradients clipping scales."""
    non_finite: NonFinite = NonFinite.skip
    """What a NaN or infinite gradient does."""
    missing_grad: MissingGrad = MissingGrad.leave
    """What a parameter without a gradient does: left alone (no decay, no momentum), or an error."""
    qk_clip: float | None = number(None, above=0, example=100.0)
    """Largest attention logit: after a step, queries and keys of heads above it are scaled down to it (MuonClip;
    under Megatron only); null turns it off."""
    adamw: ScalarAdamW = field(default_factory=ScalarAdamW)
    """Options of AdamW for the rest."""


@dataclass
class AdamW:
    """Megatron's own AdamW, untouched: the baseline that Muon is compared with."""

    _target_: str = "hp_muon_plugin.muon.build_adamw"
    """For hosts that use ``hydra.utils.instantiate(cfg.optimizer, params=model.named_parameters())``."""
    name: str = "adamw"
    """Name by which our trainer knows this optimizer."""
    lr: float = number(3e-3, above=0)
    """Peak learning rate."""
    betas: list[float] = numbers([0.9, 0.95], least=0, below=1)
    """Decay rates of the first and second moment."""
    eps: float = number(1e-8, above=0)
    """Added to the root of the second moment."""
    weight_decay: float = number(0.1, least=0)
    """Decoupled weight decay; norms and biases: always 0."""
    clip_grad: float = number(1.0, least=0)
    """Largest global gradient norm, as for hp_muon; 0 turns clipping off."""
