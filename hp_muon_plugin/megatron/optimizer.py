"""The plugin's optimizer as a MegatronOptimizer: what every Megatron trainer expects of one."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from hp_muon_plugin.config.choices import MissingGrad, NonFinite
from hp_muon_plugin.megatron.complaints import Complaints
from hp_muon_plugin.megatron.first_step import FirstStep
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.main_params import ParamPair, move
from hp_muon_plugin.megatron.missing import MissingGradients
from hp_muon_plugin.megatron.norms import CountedParam, grad_norms, num_zeros
from hp_muon_plugin.megatron.optimizer_state import load_main_params, sharded_optimizer_state
from hp_muon_plugin.megatron.qk_clip import QkClip
from hp_muon_plugin.megatron.refusals import refuse_own_qk_clip
from hp_muon_plugin.muon.clipping import GradNorms, clip_gradients
from hp_muon_plugin.muon.gradients import OF_ANOTHER_RANK, listed, non_finite_error
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.platform.collectives import group_device

logger = logging.getLogger(__name__)


class HpMuonMegatronOptimizer(MegatronOptimizer):  # type: ignore[misc]  # megatron-core is untyped
    """Muon and AdamW over Megatron's data-parallel wrapper.

    It computes the gradient norm and clips by itself, because a matrix's gradient may be clipped
    or not by choice, and skips a step whose gradients are not finite, also in bf16 and fp32, where
    Megatron would take it.

    Args:
        inner: The optimizer over the main parameters.
        config: megatron-core's ``OptimizerConfig``, for ``log_num_zeros_in_grad`` and
            ``grad_norm_skip_threshold``; all else is in the inner optimizer's options.
        pairs: Model and main parameters, in the order of the inner optimizer's groups.
        counted: The same parameters as norms count them.
        groups: Megatron's groups.
    """

    def __init__(
        self,
        inner: HpMuonOptimizer,
        config: Any,
        pairs: Sequence[ParamPair],
        counted: Sequence[CountedParam],
        groups: MegatronGroups,
    ) -> None:
        super().__init__(inner, config, init_state_fn=lambda optimizer, config=None: optimizer.init_state())
        self.is_stub_optimizer = False
        self.grad_stats_parallel_group = groups.dense_stats.group
        self.grad_norms_last: GradNorms | None = None
        """Norms of the last step, for metrics."""
        self.qk_clip: QkClip | None = None
        """Set by :meth:`clip_logits`."""
        self._pairs = tuple(pairs)
        self._counted = tuple(counted)
        self._groups = groups
        missing: MissingGradients | None = None
        if inner.config.missing_grad == MissingGrad.error:
            specs = [(pair.model, param.spec) for pair, param in zip(pairs, counted, strict=True)]
            missing = MissingGradients(specs, groups)
        self._complaints = Complaints(inner, missing)
        self._one = torch.ones(1, device=pairs[0].main.device if pairs else group_device(groups.dense_stats))

    @property
    def num_skipped(self) -> int:
        """Steps that were left out, for example because of a NaN or infinite gradient."""
        return int(self.optimizer.skipped_steps)

    @property
    def groups(self) -> MegatronGroups:
        """Megatron's groups, with the ranks over which norms add up."""
        return self._groups

    @property
    def parts(self) -> list[tuple[ParamPair, CountedParam]]:
        """What this rank updates, in the order of the groups, and how it is counted."""
        return list(zip(self._pairs, self._counted, strict=True))

    @property
    def first_step(self) -> FirstStep | None:
        """What watches for a model that is trained and not updated, until the first step is over."""
        return self._complaints.first_step

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Watch the first step for chunks that take no part in it.

        Args:
            chunks: Wrapped model chunks of this rank.
        """
        self._complaints.first_step = FirstStep(chunks)

    def clip_logits(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Clip attention logits after each step, if ``optimizer.qk_clip`` asks for it.

        Args:
            chunks: Model chunks of this rank.

        Raises:
            ConfigError: If the logits of a layer cannot be seen or scaled, or Megatron clips them itself.
        """
        refuse_own_qk_clip(chunks)
        threshold = self.optimizer.config.qk_clip
        if threshold is not None:
            mains = {pair.model: pair.main for pair in self._pairs}
            self.qk_clip = QkClip(chunks, mains, self._groups.dp, threshold)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of model and main parameters; ``main_grad`` belongs to the wrapper.

        Args:
            set_to_none: As in torch; False fills with zeros instead.
        """
        self._complaints.forget()
        if self.qk_clip is not None:
            self.qk_clip.forget()
        for pair in self._pairs:
            for param in {pair.model, pair.main}:
                if set_to_none or param.grad is None:
                    param.grad = None
                else:
                    param.grad.zero_()

    def get_loss_scale(self) -> torch.Tensor:
        """``(1,)`` float32, always 1: fp16 is refused."""
        return self._one

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Point every main parameter's ``.grad`` at the reduced gradient, and decide whether to step.

        Returns:
            True if a gradient on some rank is NaN or infinite: then the step must be left out, and is
            counted. The same on every rank, as Megatron's contract needs it before
            :meth:`step_with_ready_grads`.

        Raises:
            GradientError: On every rank, as ``optimizer.non_finite`` and ``missing_grad`` say, or if a
                parameter was unfrozen after the optimizer was built.
            HookError: On every rank, in the first step, if other model chunks are trained than those of this optimizer.
        """
        for pair in self._pairs:
            grad = getattr(pair.model, "main_grad", None) if pair.model.requires_grad else None
            pair.main.grad = None if grad is None else grad.to(pair.main.dtype)
        against = self._complaints.count(self._one.device)
        self.grad_norms_last, counts = grad_norms(self._counted, self._groups, against)
        self._complaints.refuse(counts)
        if self.grad_norms_last.is_finite:
            return False
        self._refuse()
        return True

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Norm over the whole model, the same on every rank."""
        self.grad_norms_last, _ = grad_norms(self._counted, self._groups)
        return self.grad_norms_last.total

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale gradients so that their norm is at most ``clip_grad``, and return the norm before.

        Args:
            clip_grad: Largest norm; 0 only measures.

        Returns:
            The total norm.
        """
        self.get_grad_norm()
        return self._clip(clip_grad)

    def _clip(self, clip_grad: float) -> float:
        """Clip by the norms that are known already."""
        assert self.grad_norms_last is not None
        grads = [(p.algorithm, p.main.grad) for p in self._counted if p.main.grad is not None]
        clip_gradients(grads, self.grad_norms_last, clip_grad=clip_grad, mode=self.optimizer.config.clip_mode)
        return self.grad_norms_last.total

    def count_zeros(self) -> int:
        """Zeros in the gradients of the whole model, the same on every rank."""
        return num_zeros(self._counted, self._groups)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update main parameters from ``.grad`` and copy them into the model.

        Returns:
            True.
        """
        self.optimizer.update()
        if self.qk_clip is not None:
            self.qk_clip.apply()
        self._publish()
        return True

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """One step as Megatron's trainers call it.

        Returns:
            ``(True, gradient norm, zeros or None)``, or ``(False, None, None)`` for a step that was
            left out because a gradient on some rank is NaN or infinite; False with norm and zeros for
            one whose norm is above Megatron's ``grad_norm_skip_threshold``. Every rank returns the same.

        Raises:
            GradientError: As :meth:`prepare_grads` does.
        """
        if self.prepare_grads():
            return False, None, None
        norm = self._clip(self.optimizer.config.clip_grad)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        threshold = getattr(self.config, "grad_norm_skip_threshold", math.inf)  # 0.19 and later
        if norm > threshold:
            self.optimizer.note_skipped(f"gradient norm {norm:.4g} is above grad_norm_skip_threshold={threshold:g}")
            return False, norm, zeros
        return self.step_with_ready_grads(), norm, zeros

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take the model's weights as new main parameters, after they were changed from outside.

        Args:
            state_dict: Model state of higher precision to take them from (0.14 and later); not
                needed here, because this optimizer's own state holds the float32 masters.
        """
        for pair in self._pairs:
            if pair.is_copy:
                pair.main.copy_(pair.model)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """State of this rank.

        Args:
            is_loading: Create missing state first.

        Returns:
            ``optimizer`` (state and groups) and ``main_params`` (float32 masters, in order).
        """
        if is_loading:
            self.optimizer.init_state()
        return {
            "optimizer": self.optimizer.state_dict(),
            "main_params": [pair.main.detach() for pair in self._pairs if pair.is_copy],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` or :meth:`sharded_state_dict` gave.

        Args:
            state_dict: The state.
        """
        load_main_params(self.optimizer, [pair.main for pair in self._pairs if pair.is_copy], state_dict)
        self._publish()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None, **kwargs: Any
    ) -> Any:
        """State for megatron-core's distributed checkpoints.

        Args:
            model_sharded_state_dict: The model's, whose shards tell how each parameter is cut.
            is_loading: Whether it is to be loaded into.
            metadata: Ignored; accepted for newer versions.
            **kwargs: Ignored, likewise.

        Returns:
            A sharded state dict.
        """
        pairs = [(pair.model, pair.main if pair.is_copy else None) for pair in self._pairs]
        return sharded_optimizer_state(
            self.state_dict(is_loading), pairs, model_sharded_state_dict, is_loading=is_loading
        )

    def offload_to_cpu(self) -> None:
        """Keep masters and state in host memory until :meth:`restore_from_cpu`; no step may be taken in between."""
        move(self._pairs, self.optimizer.state, "cpu")

    def restore_from_cpu(self) -> None:
        """Bring masters and state back to the model's device."""
        move(self._pairs, self.optimizer.state, None)

    def _publish(self) -> None:
        copies = [pair for pair in self._pairs if pair.is_copy]
        if copies:
            torch._foreach_copy_([pair.model for pair in copies], [pair.main for pair in copies])

    def _refuse(self) -> None:
        names = [
            p.spec.name
            for p in self._counted
            if p.main.grad is not None and not bool(torch.isfinite(p.main.grad).all())
        ]
        if self.optimizer.config.non_finite == NonFinite.error:
            raise non_finite_error(names)
        self.optimizer.note_skipped(f"NaN or infinite gradient in {listed(names) or OF_ANOTHER_RANK}")
