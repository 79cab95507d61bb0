"""Prompts: where they come from, how a model reads them, and the one place that pads."""

from ppo_lightning.data.demonstrations.demonstration import Demonstration, demonstration_of
from ppo_lightning.data.demonstrations.demonstration_set import DemonstrationSet
from ppo_lightning.data.demonstrations.learned import Example, Learner
from ppo_lightning.data.demonstrations.packing import (
    TokenRows,
    packed_rows,
    padded_rows,
    row_groups,
    token_rows,
)
from ppo_lightning.data.demonstrations.sft_datamodule import (
    Demonstrations,
    ExampleBatch,
    SFTDataModule,
)
from ppo_lightning.data.preferences.pairs import PreferencePair, preference_pair, read_pairs
from ppo_lightning.data.preferences.preference_datamodule import PreferenceDataModule
from ppo_lightning.data.prompts.chats import read_turns
from ppo_lightning.data.prompts.collate import left_pad, make_prompt_batch
from ppo_lightning.data.prompts.feeds import PromptFeed, Taken
from ppo_lightning.data.prompts.identity import Likeness, normalized, prompt_key
from ppo_lightning.data.prompts.mixture import MixturePart, MixturePrompts
from ppo_lightning.data.prompts.prompt_set import Overlong, PromptSet, shuffled_order
from ppo_lightning.data.prompts.raw import prompt_of
from ppo_lightning.data.prompts.reader import PromptReader
from ppo_lightning.data.prompts.rendering import Chat, Tokenizer, render, tokenize
from ppo_lightning.data.prompts.sources import (
    FilePrompts,
    JsonlPrompts,
    PromptList,
    Prompts,
    PromptSource,
    RawPrompt,
    TextPrompts,
    as_source,
)
from ppo_lightning.data.prompts.split import SplitPrompts, warn_of_overlap
from ppo_lightning.data.records.base import (
    BadRecords,
    ListRecords,
    Record,
    RecordSource,
    read_examples,
)
from ppo_lightning.data.records.files import CsvRecords, JsonlRecords, JsonRecords, TextRecords
from ppo_lightning.data.records.formats import as_records
from ppo_lightning.data.records.functions import FunctionPrompts, FunctionRecords
from ppo_lightning.data.records.tables import DatasetRecords, ParquetRecords
from ppo_lightning.data.steps.step_loader import StepLoader
from ppo_lightning.data.steps.supervised_datamodule import SupervisedDataModule
from ppo_lightning.data.streams.streamed import StreamedPrompts, streamed_order

__all__ = [
    "BadRecords",
    "Chat",
    "CsvRecords",
    "DatasetRecords",
    "Demonstration",
    "DemonstrationSet",
    "Demonstrations",
    "Example",
    "ExampleBatch",
    "FilePrompts",
    "FunctionPrompts",
    "FunctionRecords",
    "JsonRecords",
    "JsonlPrompts",
    "JsonlRecords",
    "Learner",
    "Likeness",
    "ListRecords",
    "MixturePart",
    "MixturePrompts",
    "Overlong",
    "ParquetRecords",
    "PreferenceDataModule",
    "PreferencePair",
    "PromptFeed",
    "PromptList",
    "PromptReader",
    "PromptSet",
    "PromptSource",
    "Prompts",
    "RawPrompt",
    "Record",
    "RecordSource",
    "SFTDataModule",
    "SplitPrompts",
    "StepLoader",
    "StreamedPrompts",
    "SupervisedDataModule",
    "Taken",
    "TextPrompts",
    "TextRecords",
    "TokenRows",
    "Tokenizer",
    "as_records",
    "as_source",
    "demonstration_of",
    "left_pad",
    "make_prompt_batch",
    "normalized",
    "packed_rows",
    "padded_rows",
    "preference_pair",
    "prompt_key",
    "prompt_of",
    "read_examples",
    "read_pairs",
    "read_turns",
    "render",
    "row_groups",
    "shuffled_order",
    "streamed_order",
    "token_rows",
    "tokenize",
    "warn_of_overlap",
]
