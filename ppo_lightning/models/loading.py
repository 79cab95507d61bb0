"""Loading tokenizers and models: the one door to transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from ppo_lightning.configs import (
    BackboneConfig,
    Checkpointing,
    CriticConfig,
    DType,
    PolicyConfig,
    Quantization,
    ReferenceConfig,
)
from ppo_lightning.errors import ModelError
from ppo_lightning.models.adapters import keep_original, quiet_peft
from ppo_lightning.models.checks import (
    check_behaviour,
    check_decoder,
    check_same_ids,
    positions_of,
)
from ppo_lightning.models.compiling import compile_blocks
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.models.folders import (
    adapter_base,
    has_tokenizer,
    is_adapter,
    named,
    require_readable_config,
    unreadable,
)
from ppo_lightning.models.fused import fuse_layers, recompute_gates
from ppo_lightning.models.last_block import learn_narrow_layers, recomputed_alike
from ppo_lightning.models.locate import local_path
from ppo_lightning.models.precision import quantise_linears
from ppo_lightning.models.reading import learn_reading
from ppo_lightning.models.score_head import one_score_config, score_layer, start_head
from ppo_lightning.models.settings import (
    FolderSettings,
    keep_settings,
    neutral_generation,
    silence_config,
    silence_modules,
)
from ppo_lightning.models.skeleton import is_weightless
from ppo_lightning.models.stopping import listed_end_ids
from ppo_lightning.models.value_network import ValueNetwork
from ppo_lightning.models.weights import read_weights, reading, require_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CLASSIFIER = "ForSequenceClassification"


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    One without a pad token gets its end token for that: nothing here looks for a pad id, masks come
    from recorded lengths.

    Args:
        path: As in ``PolicyConfig``.
        trust_remote_code: Run code that the folder carries.

    Raises:
        ModelError: There is no tokenizer at ``path``.
    """
    folder = local_path(path)
    if is_adapter(folder) and not (Path(folder) / "tokenizer_config.json").is_file():
        folder = local_path(adapter_base(folder))
    if Path(folder).is_dir() and not has_tokenizer(folder):
        raise ModelError(
            f"`{path}` holds no tokenizer: give a folder with one (`tokenizer_config.json`), such "
            "as `tokenizer.save_pretrained` writes."
        )
    require_readable_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise unreadable(path, "tokenizer", error) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def load_causal_lm(
    config: PolicyConfig,
    *,
    dtype: DType | None = None,
    quantization: Quantization | None = None,
    keep_dropout: bool = False,
) -> PreTrainedModel:
    """Load a causal language model, without dropout and without sampling settings of its own.

    What the folder says about both is remembered and written again by ``save_model``. A folder that
    holds an adapter is merged into its base: the result is the fine-tuned model itself, and so is a
    reference made of it. The config's own ``lora`` is not attached here. A quantised model is
    frozen, and remembers where its weights are to be had as they were.

    Args:
        config: Where it lies and how to run it.
        dtype: Instead of the config's.
        quantization: Instead of the config's.
        keep_dropout: Leave dropout as the folder has it.

    Raises:
        ModelError: There is no such model, it is not a causal language model, or it cannot be
            quantised.
    """
    dtype = dtype or config.dtype
    model = _load(AutoModelForCausalLM, config, dtype, keep_dropout=keep_dropout)
    if kind := quantization or config.quantization:
        _quantise(
            model, kind, partial(load_causal_lm, dtype=dtype, keep_dropout=keep_dropout), config
        )
    enable_checkpointing(model, config.gradient_checkpointing, "policy")
    if config.compile:
        compile_blocks(model, setting="policy.compile")
    return model


def _quantise(
    model: PreTrainedModel,
    quantization: Quantization,
    load: Callable[[PolicyConfig], PreTrainedModel],
    source: PolicyConfig,
) -> None:
    model.requires_grad_(False)
    if not is_weightless():
        plain = replace(
            source, quantization=None, lora=None, gradient_checkpointing=False, compile=False
        )
        keep_original(model, partial(_load_original, load, plain, fingerprint(model)))
    quantise_linears(model, quantization)


def _load_original(
    load: Callable[[PolicyConfig], PreTrainedModel], source: PolicyConfig, digest: str
) -> PreTrainedModel:
    """Load once more what was quantised.

    Raises:
        ModelError: Its weights are others by now.
    """
    model = load(source)
    if fingerprint(model.requires_grad_(False)) != digest:
        raise ModelError(
            f"`{source.path}` holds other weights than when they were quantised, so that the "
            "adapters cannot be merged into them. Put the former model back and export the "
            "checkpoint."
        )
    return model


def load_value_network(config: CriticConfig, policy: PolicyConfig) -> ValueNetwork:
    """Load a critic with a trunk of its own.

    A language model lends its trunk and gets a new head; a sequence classifier with one score, such
    as a reward model, lends both.

    Args:
        config: Path (None takes the policy's), start of the head, dtype.
        policy: How the policy is loaded; the critic follows it where it says nothing.

    Raises:
        ModelError: There is no such model, or it is not a decoder.
    """
    source = replace(policy, path=config.path or policy.path)
    with named("policy.path" if config.path is None else "critic_model.path"):
        network = _value_network(source, config)
    enable_checkpointing(network.backbone, config.gradient_checkpointing, "critic_model")
    if config.compile:
        compile_blocks(network.backbone, setting="critic_model.compile")
    return network


def _value_network(source: PolicyConfig, config: CriticConfig) -> ValueNetwork:
    dtype = config.dtype or source.dtype
    if _is_classifier(source):
        classifier = _load(AutoModelForSequenceClassification, source, dtype)
        return ValueNetwork.from_sequence_classifier(classifier)
    model = _load(AutoModelForCausalLM, source, dtype)
    return ValueNetwork.from_causal_lm(model, head_init=config.head_init)


def load_reward_model(
    path: str,
    *,
    dtype: DType = "float32",
    attn_implementation: str | None = "sdpa",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a frozen sequence classifier, decoder or encoder, with the tokenizer of its folder.

    Args:
        path: As in ``PolicyConfig``.
        dtype: Of the weights.
        attn_implementation: As in ``PolicyConfig``.
        trust_remote_code: Run code that the folder carries.

    Raises:
        ModelError: There is no such model, or its score layer has no weights.
    """
    source = PolicyConfig(
        path=path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    model = _load(AutoModelForSequenceClassification, source, dtype, decoder=False)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model.requires_grad_(False), tokenizer


def load_scorer(config: BackboneConfig, *, keep_dropout: bool = False) -> PreTrainedModel:
    """Load what is to become a reward model: a sequence classifier with one score.

    A causal language model or an encoder lends its trunk and gets a new head, and so does a
    classifier of several labels; one of a single score keeps its head. An adapter is merged.

    Args:
        config: Where it lies, and the start of a new head: of a head of several layers (RoBERTa's)
            the last one starts so, the others as their family has it.
        keep_dropout: Leave dropout as the folder has it.

    Raises:
        ModelError: There is no such model, its family has no classifier, or it is an
            encoder-decoder.
    """
    folder = local_path(config.path)
    if is_adapter(folder):
        merged = load_causal_lm(config, keep_dropout=keep_dropout)
        critic = ValueNetwork.from_causal_lm(merged, head_init=config.head_init)
        return critic.as_sequence_classifier()
    model = _load(
        AutoModelForSequenceClassification,
        config,
        config.dtype,
        decoder=False,
        one_score=True,
        keep_dropout=keep_dropout,
    )
    if not _has_one_score(_config(config, folder)):
        start_head(score_layer(model), config.head_init)
    return model


def _has_one_score(config: Any) -> bool:
    is_classifier = any(name.endswith(CLASSIFIER) for name in config.architectures or ())
    return is_classifier and config.num_labels == 1


def _load(
    auto: Any,
    source: PolicyConfig,
    dtype: DType,
    *,
    decoder: bool = True,
    one_score: bool = False,
    keep_dropout: bool = False,
) -> PreTrainedModel:
    """Load and silence a model; adapters are merged.

    Args:
        auto: Class of transformers that picks the model's own.
        source: Where it lies and how to run it.
        dtype: Of the weights.
        decoder: Insist on one.
        one_score: Make it a classifier of one score, with a new head where it has no such one.
        keep_dropout: Leave dropout as the folder has it.
    """
    folder = local_path(source.path)
    if is_adapter(folder):
        return _load_adapter(auto, replace(source, path=folder), dtype, keep_dropout=keep_dropout)
    config = _config(source, folder)
    if decoder:
        check_decoder(config, source.path, classifier=auto is AutoModelForSequenceClassification)
    new_head = one_score and not _has_one_score(config)
    if one_score:
        one_score_config(config, source.path)
    noise = {} if keep_dropout else silence_config(config)
    model = read_weights(auto, source, folder, config, dtype, new_head=new_head)
    generation = getattr(model, "generation_config", None)
    keep_settings(model, FolderSettings(noise=noise, generation=generation))
    if generation is not None:
        model.generation_config = neutral_generation(generation)
    if not keep_dropout:
        silence_modules(model)
    _unblind_padding(model)
    model.eval()  # type: ignore[no-untyped-call]
    if source.fused_layers:
        fuse_layers(model)
    if decoder:
        check_behaviour(model, source.path)
        learn_reading(model, packing=source.padding_free)
    if source.fused_layers and (decoder or hasattr(model, "score")):
        learn_narrow_layers(model)
    return model


def position_limit(source: PolicyConfig) -> int | None:
    """Most tokens that a policy can read at once, known before its weights are loaded."""
    folder = local_path(source.path)
    if is_adapter(folder):
        folder = local_path(adapter_base(folder))
    return positions_of(_config(source, folder))


def folder_end_ids(source: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Collect every id that ends a response, before the weights are loaded.

    They are those of ``end_token_ids`` for the loaded model.

    Args:
        source: The policy.
        tokenizer: Its own end token comes first.
    """
    folder = local_path(source.path)
    if is_adapter(folder):
        folder = local_path(adapter_base(folder))
    config = _config(source, folder)
    try:
        generation: Any = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError):
        generation = None  # of a folder that holds none; transformers makes one of the config
    return listed_end_ids(tokenizer, generation, config)


def position_limits(
    policy: PolicyConfig, critic: CriticConfig, reference: ReferenceConfig
) -> dict[str, int]:
    """Most tokens that each model of a run can read at once, by the setting that names the model.

    Models that nothing limits are left out, and so are those made of the policy's own folder.
    """
    sources = {"policy.path": policy} | _other_sources(policy, critic, reference)
    limits: dict[str, int | None] = {}
    for name, source in sources.items():
        with named(name):
            limits[name] = position_limit(source)
    return {name: limit for name, limit in limits.items() if limit is not None}


def check_tokenizers(
    tokenizer: PreTrainedTokenizerBase,
    policy: PolicyConfig,
    critic: CriticConfig,
    reference: ReferenceConfig,
) -> None:
    """Insist that critic and reference mean the same tokens by the same ids as the policy.

    They read the policy's ids. Models without a tokenizer are taken on trust.

    Raises:
        ModelError: Names the setting, both sizes and the first id that stands for another token.
    """
    for name, source in _other_sources(policy, critic, reference).items():
        try:
            theirs = load_tokenizer(source.path, trust_remote_code=source.trust_remote_code)
        except ModelError:
            continue
        check_same_ids(tokenizer.get_vocab(), theirs.get_vocab(), name)


def _other_sources(
    policy: PolicyConfig, critic: CriticConfig, reference: ReferenceConfig
) -> dict[str, PolicyConfig]:
    """Where critic and reference come from, if not from the policy's folder."""
    paths = {"critic_model.path": critic.path, "reference.path": reference.path}
    return {
        name: replace(policy, path=path)
        for name, path in paths.items()
        if path is not None and path != policy.path
    }


def _config(source: PolicyConfig, folder: str) -> Any:
    require_readable_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError) as error:
        raise unreadable(source.path, "model", error) from error


def _unblind_padding(model: PreTrainedModel) -> None:
    """Let the embedding of the pad id learn: often it is the end token's, which is real text."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None


def enable_checkpointing(model: PreTrainedModel, what: Checkpointing, setting: str) -> None:
    """Recompute activations in the backward pass.

    Layers do so in training mode only, and Lightning leaves modes as they are. Without dropout,
    training mode changes nothing else. Gates do so in any mode.

    Args:
        model: Just loaded.
        what: All of a block, its gate alone, or nothing.
        setting: Names of the settings begin so in messages.

    Raises:
        ModelError: It has no gates of the usual kind.
    """
    if what == "gates" and not recompute_gates(model):
        raise ModelError(
            f"{type(model).__name__} has no gates of the usual kind, silu(gate) * up, to "
            f"recompute: set `{setting}.gradient_checkpointing` to true or false."
        )
    if what is not True:
        return
    settings = {"use_reentrant": False, "context_fn": recomputed_alike}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5.24 and newer
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        older: Any = model
        older.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model.train()


def _is_classifier(source: PolicyConfig) -> bool:
    folder = local_path(source.path)
    if is_adapter(folder):
        return False
    config = _config(source, folder)
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def _load_adapter(
    auto: Any, source: PolicyConfig, dtype: DType, *, keep_dropout: bool
) -> PreTrainedModel:
    """Load the base of an adapter and work the adapter into its weights."""
    from peft import PeftModel

    if auto is not AutoModelForCausalLM:
        raise ModelError(
            f"`{source.path}` holds an adapter of a reward model; merge it into its base with "
            "`merge_and_unload`, save that, and give its folder."
        )
    base_source = replace(source, path=adapter_base(source.path))
    base = _load(auto, base_source, dtype, keep_dropout=keep_dropout)
    if is_weightless():
        return base  # what is merged into it changes no shape
    with quiet_peft(), reading(source.path):
        adapted = PeftModel.from_pretrained(base, source.path)
    require_finite(adapted, source.path)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)
