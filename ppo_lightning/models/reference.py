"""The frozen policy that the KL is measured against."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ppo_lightning.configs import PolicyConfig, ReferenceConfig
from ppo_lightning.distributed import is_sharded, local, placed_like
from ppo_lightning.errors import ModelError
from ppo_lightning.models.adapters import adapter_disabled, base_causal_lm, is_adapted
from ppo_lightning.models.compiling import compile_like
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.models.folders import named
from ppo_lightning.models.loading import load_causal_lm
from ppo_lightning.models.scoring import PolicyOutput, policy_logprobs
from ppo_lightning.models.sharding import shard_model
from ppo_lightning.types import Sequences

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReferencePolicy:
    """Holds the reference without being a module: no checkpoint keys, no gradient sync.

    Args:
        model: The reference itself; or, with ``adapter_off``, the actor.
        adapter_off: The reference is ``model`` with its adapter switched off.
        device: Where it stays; None is where it is moved to.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adapter_off: bool = False,
        device: torch.device | None = None,
    ) -> None:
        if adapter_off and not is_adapted(model):
            raise ValueError("`adapter_off` needs a model with an adapter.")
        self.adapter_off = adapter_off
        self._own_device = device
        self._shares_base = False  # a copy of the actor's adapters on the actor's own base
        self._model = model if adapter_off else model.eval().requires_grad_(False)

    @classmethod
    def build(
        cls, reference: ReferenceConfig, policy: PolicyConfig, actor: nn.Module
    ) -> ReferencePolicy:
        """Make the reference of a run.

        The policy's own starting weights are wanted unless a path is given. An actor with adapters
        has them at hand; otherwise they are read again, so it does not matter whether the actor
        has been trained or resumed meanwhile.

        Args:
            reference: Path, and how a second copy is kept.
            policy: How the policy is loaded.
            actor: The policy being trained.

        Raises:
            ModelError: The reference cannot be loaded.
        """
        if reference.is_start_of(policy) and is_adapted(actor):
            return cls(actor, adapter_off=True)
        source = replace(
            policy,
            path=reference.path or policy.path,
            lora=None,
            quantization=None,
            gradient_checkpointing=False,
            compile=policy.compile and reference.quantization is None,
        )
        with named("policy.path" if reference.path is None else "reference.path"):
            model = load_causal_lm(
                source, dtype=reference.dtype, quantization=reference.quantization
            )
        own = None if reference.device == "auto" else torch.device(reference.device)
        return cls(model, device=own)

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequences,
        *,
        temperature: float,
        entropy: bool = False,
        logits: bool = False,
    ) -> PolicyOutput:
        """Score response tokens, without gradient; see ``policy_logprobs``.

        What comes back lies where the sequences do.
        """
        home = sequences.prompt_ids.device
        away = self.device != home
        if away:
            sequences = replace(sequences, trunk=None).to(self.device)
        with self.causal_lm() as model:
            found = policy_logprobs(
                model, sequences, temperature=temperature, entropy=entropy, logits=logits
            )
        if not away:
            return found
        return PolicyOutput(*(None if part is None else part.to(home) for part in found))  # type: ignore[arg-type]

    @property
    def network(self) -> nn.Module:
        """The model; the actor, where it is the one with its adapter off."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(chain(self._model.parameters(), self._model.buffers())).device

    @contextmanager
    def causal_lm(self) -> Iterator[nn.Module]:
        """Lend the reference, to score or to sample with; an adapter is off meanwhile."""
        if not self.adapter_off:
            yield base_causal_lm(self._model)
            return
        with adapter_disabled(self._model):
            yield base_causal_lm(self._model)

    def fingerprint(self) -> str:
        """Digest of a copy of its own; ``""`` where the reference is the actor's own base."""
        return "" if self.adapter_off else fingerprint(self._model)

    # ------------------------------------------------------------------ refresh and pull-back

    @torch.no_grad()
    def refresh(self, actor: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        """Become a frozen copy of the actor.

        A full copy is overwritten in place. An actor with adapters gives a copy of its adapters;
        the base stays shared. Merging them would cost another base, and would round: a KL to the
        actor of exactly 0 needs the same sums in the same order.

        Args:
            actor: The policy being trained; left alone.
            weights: Trained weights to take instead of the actor's own, from ``taken_over``.

        Raises:
            ModelError: A weight of an actor without adapters is not there, or of another shape.
        """
        given = trained_weights(actor) if weights is None else weights
        if is_adapted(actor) and not self._shares_base:
            self._model, self.adapter_off, self._shares_base = _sharing_frozen(actor), False, True
            self._own_device = None
        own = dict(self._model.named_parameters())
        _require_same(own, given)
        for name, weight in given.items():
            own[name].copy_(placed_like(weight, own[name]))

    def taken_over(self, actor: nn.Module) -> dict[str, Tensor]:
        """Return the reference's own value of every weight that the actor trains, not a copy."""
        own = dict(self._model.named_parameters())
        return {name: own[name] for name in trained_weights(actor)}

    @torch.no_grad()
    def as_it_is(self, actor: nn.Module) -> dict[str, Tensor]:
        """Return weights from which ``refresh`` makes the present reference again; on the CPU.

        An adapter that is off says what one does whose second factor is 0.
        """
        return {
            name: torch.zeros_like(weight, device="cpu")
            if self.adapter_off and _is_lora_b(name)
            else local(weight.detach()).to("cpu", copy=True)
            for name, weight in self.taken_over(actor).items()
        }

    def require_alike(self, actor: nn.Module) -> None:
        """Refuse an actor whose weights the reference cannot take and give back.

        Raises:
            ModelError: A weight of the actor is not there, or of another shape; or it has adapters
                and the reference is not on its base, so that no adapter says what it is now.
        """
        if is_adapted(actor) and not (self.adapter_off or self._shares_base):
            raise ModelError(
                "a reference of its own cannot become an actor with adapters: leave out `path`, "
                "`dtype`, `quantization` and `device` of `reference`."
            )
        if is_adapted(actor) and is_sharded(actor):
            raise ModelError(
                "a reference cannot become an actor with adapters whose weights lie in shards: use "
                "`trainer.strategy: ddp`, or leave the refresh out."
            )
        if not is_adapted(actor):
            _require_same(dict(self._model.named_parameters()), trained_weights(actor))

    @torch.no_grad()
    def pull(self, actor: nn.Module, weight: float) -> None:
        """Move the actor's weights towards the reference's, in place.

        W becomes (1 − w)·W + w·W_ref. With adapters W = W_ref + s·B·A, so that is W_ref +
        s·((1 − w)·B)·A: scaling B alone does it exactly, and scaling A as well would square the
        factor. With w = 1 B is 0 as it was at the start, while A stays, so it can be trained again.

        Args:
            actor: The policy being trained.
            weight: w in (0, 1]; 1 is a reset.

        Raises:
            ModelError: See ``require_pullable``.
        """
        self.require_pullable(actor)
        own = dict(self._model.named_parameters())
        for name, parameter in trained_weights(actor).items():
            if self.adapter_off:
                if _is_lora_b(name):
                    _pull(parameter, torch.zeros_like(parameter), weight)
            else:
                _pull(parameter, placed_like(own[name], parameter), weight)

    def require_pullable(self, actor: nn.Module) -> None:
        """Refuse an actor that cannot get to the reference in the space of its weights.

        Raises:
            ModelError: It has adapters, and the reference is not its own base; or, without them,
                see ``require_alike``.
        """
        if is_adapted(actor) and not self.adapter_off:
            raise ModelError(
                "adapters can only be pulled back to the base that they are on: leave out "
                "`path`, `dtype`, `quantization` and `device` of `reference`, and do not refresh "
                "it."
            )
        self.require_alike(actor)

    def shard(self, mesh: DeviceMesh) -> None:
        """Cut a copy of its own over ranks, unless it stays on a device of its own.

        An actor with its adapter off is cut by whoever trains it.
        """
        if not self.adapter_off and self._own_device is None:
            shard_model(base_causal_lm(self._model), mesh)

    def to(self, device: torch.device | str) -> ReferencePolicy:
        """Move a copy of its own; an actor with its adapter off is moved by whoever trains it.

        Raises:
            ModelError: There is no such device as ``reference.device`` names.
        """
        if not self.adapter_off:
            self._model.to(device if self._own_device is None else _present(self._own_device))
        return self


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable weights by name; tied ones once."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _present(device: torch.device) -> torch.device:
    """Insist that a device is here."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ModelError(
            f"`reference.device: {device}`: this machine has {count} such devices. Set `auto`."
        )
    return device


def _require_same(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, weight in given.items():
        if name in own and not own[name].is_floating_point():
            raise ModelError(
                "a quantised reference cannot take the actor's weights, nor be what they are "
                "pulled to: leave out `reference.quantization`."
            )
        if name not in own or weight.shape not in (own[name].shape, local(own[name]).shape):
            raise ModelError(
                f"the reference is another kind of model than the actor: `{name}` is not there, or "
                "of another shape. Leave out `reference.path`, or give a model of the same kind."
            )


def _sharing_frozen(actor: nn.Module) -> nn.Module:
    """Copy an adapted model, all but its frozen weights, which both have from now on."""
    shared = {id(weight): weight for weight in actor.parameters() if not weight.requires_grad}
    frozen = copy.deepcopy(actor, shared).eval().requires_grad_(False)
    compile_like(base_causal_lm(frozen), base_causal_lm(actor))
    return frozen


def _is_lora_b(name: str) -> bool:
    return ".lora_B." in name or ".lora_embedding_B." in name


def _pull(parameter: Tensor, target: Tensor, weight: float) -> None:
    if weight == 1.0:
        parameter.copy_(target)  # whatever it was, nan included
    else:
        parameter.lerp_(target.to(parameter), weight)
