"""Networks: the one door to transformers, and what actor, critic, reference and scorer share."""

from ppo_lightning.models.actor_critic import ActorCritic, build_actor_critic
from ppo_lightning.models.adapters import (
    adapter_disabled,
    adapter_state_keys,
    attach_lora,
    base_causal_lm,
    base_state_keys,
    is_adapted,
    merged_copy,
)
from ppo_lightning.models.checks import check_vocabulary, embedding_rows, max_positions
from ppo_lightning.models.decoding import decode_step
from ppo_lightning.models.loading import (
    end_token_ids,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    load_value_network,
    position_limit,
)
from ppo_lightning.models.locate import local_path
from ppo_lightning.models.reference import ReferencePolicy
from ppo_lightning.models.reward_model import SequenceScorer, sequence_logits
from ppo_lightning.models.saving import save_model
from ppo_lightning.models.scoring import ModelInputs, PolicyOutput, policy_logprobs
from ppo_lightning.models.settings import FolderSettings, settings_of
from ppo_lightning.models.value_network import ValueHead, ValueNetwork

__all__ = [
    "ActorCritic",
    "FolderSettings",
    "ModelInputs",
    "PolicyOutput",
    "ReferencePolicy",
    "SequenceScorer",
    "ValueHead",
    "ValueNetwork",
    "adapter_disabled",
    "adapter_state_keys",
    "attach_lora",
    "base_causal_lm",
    "base_state_keys",
    "build_actor_critic",
    "check_vocabulary",
    "decode_step",
    "embedding_rows",
    "end_token_ids",
    "is_adapted",
    "load_causal_lm",
    "load_reward_model",
    "load_tokenizer",
    "load_value_network",
    "local_path",
    "max_positions",
    "merged_copy",
    "policy_logprobs",
    "position_limit",
    "save_model",
    "sequence_logits",
    "settings_of",
]
