"""Networks: the one door to transformers, and what actor, critic, reference and scorer share."""

from ppo_lightning.models.actor_critic import ActorCritic, build_actor_critic, build_policy
from ppo_lightning.models.adapters import (
    adapter_disabled,
    attach_lora,
    base_causal_lm,
    is_adapted,
    merged_copy,
)
from ppo_lightning.models.checks import check_vocabulary, embedding_rows, max_positions
from ppo_lightning.models.compiling import compile_blocks, uncompiled
from ppo_lightning.models.decoding import check_decoding, decode_step
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.models.inputs import ModelInputs
from ppo_lightning.models.loading import (
    check_tokenizers,
    folder_end_ids,
    load_causal_lm,
    load_reward_model,
    load_scorer,
    load_tokenizer,
    load_value_network,
    position_limit,
    position_limits,
)
from ppo_lightning.models.locate import local_path
from ppo_lightning.models.reading import Reading, keep_reading, learn_reading, reading_of
from ppo_lightning.models.reference import ReferencePolicy, trained_weights
from ppo_lightning.models.reward_model import ScorerTokens, SequenceScorer, sequence_logits
from ppo_lightning.models.saving import save_model
from ppo_lightning.models.score_head import normalised_head
from ppo_lightning.models.scorer_network import base_scorer, build_scorer
from ppo_lightning.models.scoring import PolicyOutput, policy_logprobs
from ppo_lightning.models.settings import FolderSettings, add_end_id, settings_of
from ppo_lightning.models.sharding import shard_model, shard_networks
from ppo_lightning.models.slots import KeyValueSlots, read_prompts, sent, step_slots
from ppo_lightning.models.stopping import end_token_ids, special_stop_ids
from ppo_lightning.models.templates import use_template
from ppo_lightning.models.token_rows import check_packing, learned_scores
from ppo_lightning.models.value_network import ValueHead, ValueNetwork

__all__ = [
    "ActorCritic",
    "FolderSettings",
    "KeyValueSlots",
    "ModelInputs",
    "PolicyOutput",
    "Reading",
    "ReferencePolicy",
    "ScorerTokens",
    "SequenceScorer",
    "ValueHead",
    "ValueNetwork",
    "adapter_disabled",
    "add_end_id",
    "attach_lora",
    "base_causal_lm",
    "base_scorer",
    "build_actor_critic",
    "build_policy",
    "build_scorer",
    "check_decoding",
    "check_packing",
    "check_tokenizers",
    "check_vocabulary",
    "compile_blocks",
    "decode_step",
    "embedding_rows",
    "end_token_ids",
    "fingerprint",
    "folder_end_ids",
    "is_adapted",
    "keep_reading",
    "learn_reading",
    "learned_scores",
    "load_causal_lm",
    "load_reward_model",
    "load_scorer",
    "load_tokenizer",
    "load_value_network",
    "local_path",
    "max_positions",
    "merged_copy",
    "normalised_head",
    "policy_logprobs",
    "position_limit",
    "position_limits",
    "read_prompts",
    "reading_of",
    "save_model",
    "sent",
    "sequence_logits",
    "settings_of",
    "shard_model",
    "shard_networks",
    "special_stop_ids",
    "step_slots",
    "trained_weights",
    "uncompiled",
    "use_template",
]
