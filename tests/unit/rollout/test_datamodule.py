"""The data module of PPO on a stand-in for module and trainer."""

import logging
from types import SimpleNamespace

import pytest
import torch

import ppo_lightning.rollout.datamodule as datamodule
import ppo_lightning.rollout.replay_datamodule as replay_datamodule
from ppo_lightning.configs import BufferConfig
from ppo_lightning.data import SplitPrompts, StreamedPrompts, shuffled_order
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import load_tokenizer
from ppo_lightning.rollout import ReplayDataModule, RolloutDataModule
from tests.helpers.buffers import experience_of
from tests.helpers.runs import PROMPTS
from tests.helpers.sequences import sequences_of

LONGEST = 8  # tokens of the longest of the prompts, its BOS included


class Source:
    """What the data module asks of a module; keeps the prompts that it is given."""

    num_passes = 1
    num_prompts_factor = 1.0

    def begin_iteration(self, iteration):
        self.begun = iteration

    def __init__(self, folder, *, room=None):
        self.tokenizer = load_tokenizer(str(folder))
        self.max_prompt_tokens = room
        self.shortest_model = "model.init_args.critic_model.path"
        self.seen = []

    def collect(self, prompts, *, iteration, num_responses):
        self.seen.append(prompts)
        count = max(1, len(prompts))
        experience = experience_of(sequences_of([[1]] * count, [[1]] * count), iteration=iteration)
        return experience.select(torch.arange(len(prompts)))


def attached(folder, *, room=None, stage="fit", **settings):
    """A module's data module after ``setup``, at iteration 0."""
    options = {"prompts": PROMPTS, "chat": False, "seed": 3} | settings
    buffer = options.pop("buffer", {"num_prompts": 4, "num_minibatches": 2})
    data = RolloutDataModule(buffer=BufferConfig(**buffer), **options)
    data.trainer = SimpleNamespace(
        lightning_module=Source(folder, room=room), current_epoch=0, limit_val_batches=1.0
    )
    data.setup(stage)
    return data


def iterate(data, count=1):
    """The prompt batches of some iterations."""
    seen = data.trainer.lightning_module.seen
    start = len(seen)
    for _ in range(count):
        list(data.train_dataloader())
        data.trainer.current_epoch += 1
    return seen[start:]


def keys(data, count=1):
    return [batch.keys.tolist() for batch in iterate(data, count)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"overlong": "cut"}, "error, drop, truncate, got 'cut'"),
        ({"val_batch_size": 0}, "`val_batch_size` must be at least 1"),
        ({"deduplicate": "all"}, "exact, normalized, null, got 'all'"),
        ({"val_share": 1.0}, "`val_share` must lie above 0 and below 1, got 1.0"),
        ({"val_share": 0.1, "val_prompts": ["a"]}, "leave out `val_prompts`"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        RolloutDataModule(PROMPTS, **wrong)


def test_keys_are_a_function_of_seed_iteration_and_index(tiny_llama_dir):
    first, second = keys(attached(tiny_llama_dir), 2)
    assert len({*first, *second}) == 8  # no two responses share their random numbers
    assert keys(attached(tiny_llama_dir), 2) == [first, second]
    assert not set(keys(attached(tiny_llama_dir, seed=4))[0]) & {*first, *second}
    larger = {"num_prompts": 6, "num_minibatches": 2}
    assert keys(attached(tiny_llama_dir, buffer=larger))[0][:4] == first


def test_t50_ranks_share_out_the_same_responses(tiny_llama_dir, monkeypatch):
    """Five responses on two ranks: the keys and prompts of one process, each of them once."""
    buffer = {"num_prompts": 5, "num_minibatches": 2}
    (alone,) = iterate(attached(tiny_llama_dir, buffer=buffer))
    found = {}
    monkeypatch.setattr(datamodule, "num_replicas", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(datamodule, "replica", lambda rank=rank: rank)
        (batch,) = iterate(attached(tiny_llama_dir, buffer=buffer))
        texts = [record.text for record in batch.records]
        for row in zip(batch.indices.tolist(), batch.keys.tolist(), texts, strict=True):
            assert row[0] not in found
            found[row[0]] = row[1:]
    texts = [record.text for record in alone.records]
    assert found == dict(enumerate(zip(alone.keys.tolist(), texts, strict=True)))


def test_responses_to_one_prompt_share_it_and_nothing_else(tiny_llama_dir):
    buffer = {"num_prompts": 2, "responses_per_prompt": 3}
    (batch,) = iterate(attached(tiny_llama_dir, buffer=buffer))
    assert batch.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert len({record.text for record in batch.records[:3]}) == 1
    assert len(set(batch.keys.tolist())) == 6


def test_t52_position_and_seed_survive_a_resume(tiny_llama_dir):
    """Ten prompts, four an iteration: the fourth batch is the next of the same order."""
    whole = iterate(attached(tiny_llama_dir), 5)
    stopped = attached(tiny_llama_dir)
    iterate(stopped, 3)
    state = stopped.state_dict()
    assert state == {
        "position": 12,
        "tokens_per_prompt": 1.0,
        "prompts_ahead": 0,
        "seed": 3,
        "chat": False,
        "system_prompt": None,
        "prompts": state["prompts"],
    }
    resumed = attached(tiny_llama_dir, seed=99)  # another seed in the config of the new run
    resumed.load_state_dict(state)
    resumed.trainer.current_epoch = 3
    for found, expected in zip(iterate(resumed, 2), whole[3:], strict=True):
        assert torch.equal(found.keys, expected.keys)
        assert found.records == expected.records
    texts = [record.text for batch in whole for record in batch.records]
    assert sorted(texts[:10]) == sorted(texts[10:]) == sorted(PROMPTS)


class LookingAhead(Source):
    """Is told of the next prompts as well, and how many it had been asked for by then."""

    looks_ahead = True

    def prefetch(self, prompts, *, iteration):
        self.told = [*getattr(self, "told", []), (iteration, len(self.seen), prompts)]


def looking_ahead(folder, **settings):
    data = attached(folder, **settings)
    source = data.trainer.lightning_module = LookingAhead(folder)
    return data, source


def test_the_next_prompts_are_told_before_this_buffer_is_made(tiny_llama_dir):
    data, source = looking_ahead(tiny_llama_dir)
    batches = iterate(data, 3)
    plain = iterate(attached(tiny_llama_dir), 4)
    assert [batch.keys.tolist() for batch in batches] == [b.keys.tolist() for b in plain[:3]]
    assert [(number, seen) for number, seen, _ in source.told] == [(1, 0), (2, 1), (3, 2)]
    for (_, _, told), expected in zip(source.told, plain[1:], strict=True):
        assert told.keys.equal(expected.keys)
        assert told.records == expected.records


def test_what_is_made_ahead_was_sized_an_iteration_ago_also_after_a_resume(tiny_llama_dir):
    buffer = {"num_prompts": 4, "num_minibatches": 2, "num_tokens": 6}  # one token a response
    settings = {"buffer": buffer}
    data, source = looking_ahead(tiny_llama_dir, **settings)
    sizes = [len(batch) for batch in iterate(data, 4)]
    assert sizes == [4, 4, 6, 6]
    assert [len(told) for _, _, told in source.told] == [4, 6, 6, 6]
    first, _ = looking_ahead(tiny_llama_dir, **settings)
    iterate(first, 1)
    again, _ = looking_ahead(tiny_llama_dir, **settings)
    again.load_state_dict(first.state_dict())
    again.trainer.current_epoch = 1
    assert [len(batch) for batch in iterate(again, 3)] == sizes[1:]


MORE = [*PROMPTS, "the end"]


@pytest.mark.parametrize("stream", [False, "all", "lazy"])
@pytest.mark.parametrize("now", [PROMPTS, MORE, MORE[1:], PROMPTS[::-1]])
def test_other_prompts_than_before_are_warned_about_on_resume(
    tiny_llama_dir, tmp_path, caplog, stream, now
):
    def data(texts):
        path = tmp_path / "p.txt"
        path.write_text("\n".join(texts))
        prompts = StreamedPrompts(path, validate=stream) if stream else texts
        return attached(tiny_llama_dir, prompts=prompts)

    state = data(PROMPTS).state_dict()
    resumed = data(now)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state)
    told = "not those that the checkpoint" in caplog.text
    unseen = stream == "lazy" and len(now) == len(PROMPTS)  # only their number is known
    assert told == (now != PROMPTS and not unseen)


def test_a_checkpoint_that_knows_no_prompts_is_gone_on_with(tiny_llama_dir, caplog):
    state = attached(tiny_llama_dir).state_dict()
    del state["prompts"]
    attached(tiny_llama_dir).load_state_dict(state)
    assert not caplog.records


def test_a_buffer_that_could_not_be_made_moves_nothing_on(tiny_llama_dir, monkeypatch):
    data = attached(tiny_llama_dir)

    def fail(*args, **settings):
        raise RuntimeError("no reward")

    monkeypatch.setattr(data.trainer.lightning_module, "collect", fail)
    with pytest.raises(RuntimeError, match="no reward"):
        iterate(data)
    assert data.position == 0


def test_seed_comes_from_the_runs_own(tiny_llama_dir, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert RolloutDataModule(PROMPTS).seed == 17
    assert RolloutDataModule(PROMPTS, seed=0).seed == 0
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RolloutDataModule(PROMPTS).seed == 0


@pytest.mark.parametrize(
    ("room", "settings", "match"),
    [
        (
            32,
            {"max_prompt_tokens": 60},
            r"\(60\).*`.*max_new_tokens`.*critic_model\.path`.*leave 32 for a prompt",
        ),
        (0, {}, "leave 0 for a prompt"),
        (-5, {"max_prompt_tokens": 4}, "leave -5 for a prompt"),
    ],
)
def test_t07_limits_that_leave_no_room_are_refused(tiny_llama_dir, room, settings, match):
    with pytest.raises(ConfigError, match=match):
        attached(tiny_llama_dir, room=room, **settings)


def test_t07_the_models_room_limits_prompts_where_nothing_else_does(tiny_llama_dir):
    assert len(attached(tiny_llama_dir, room=LONGEST, overlong="drop").train_set) == 10
    assert attached(tiny_llama_dir, room=LONGEST - 1, overlong="drop").train_set.num_dropped == 1
    tighter = attached(tiny_llama_dir, room=50, max_prompt_tokens=3, overlong="drop")
    assert max(map(len, tighter.train_set.ids)) == 3
    assert attached(tiny_llama_dir, room=None).train_set.num_dropped == 0


def test_t06_the_engine_gets_prompts_within_the_limit(tiny_llama_dir):
    data = attached(tiny_llama_dir, max_prompt_tokens=4, overlong="truncate")
    for batch in iterate(data, 3):
        assert batch.prompt_mask.sum(1).max() <= 4


def test_t52_the_order_of_prompts_in_memory_is_the_one_it_always_was(tiny_llama_dir):
    """As it came out when it was written: a checkpoint of then must go on with the same prompts."""
    texts = [
        record.text for batch in iterate(attached(tiny_llama_dir), 3) for record in batch.records
    ]
    assert [PROMPTS.index(text) for text in texts] == shuffled_order(10, 0, 12, seed=3)
    assert shuffled_order(10, 0, 12, seed=3) == [4, 0, 2, 9, 1, 7, 5, 6, 8, 3, 1, 0]


@pytest.fixture
def stream(tmp_path):
    """Forty prompts, of which every third is too long and every seventh line is broken."""
    path = tmp_path / "stream.jsonl"
    lines = [
        f'{{"prompt": "{"the cat " * (6 if n % 3 == 0 else 1)}", "n": {n}}}'[
            : 9 if n % 7 == 0 else None
        ]
        for n in range(40)
    ]
    path.write_text("\n".join(lines))
    return path


def streamed(folder, path, **options):
    settings = {"max_prompt_tokens": 8, "overlong": "drop", "seed": 3} | options
    source = StreamedPrompts(path, on_error="skip", validate="lazy")
    return attached(folder, prompts=source, **settings)


def test_t52_a_stream_goes_on_with_the_next_prompts_whatever_it_left_out(tiny_llama_dir, stream):
    whole = iterate(streamed(tiny_llama_dir, stream), 6)
    numbers = [record.metadata["n"] for batch in whole for record in batch.records]
    usable = [n for n in range(40) if n % 3 and n % 7]
    assert sorted(numbers[: len(usable)]) == usable
    stopped = streamed(tiny_llama_dir, stream)
    iterate(stopped, 2)
    assert stopped.state_dict()["position"] > 8
    resumed = streamed(tiny_llama_dir, stream, seed=99)
    resumed.load_state_dict(stopped.state_dict())
    resumed.trainer.current_epoch = 2
    for found, expected in zip(iterate(resumed, 4), whole[2:], strict=True):
        assert found.records == expected.records
        assert torch.equal(found.keys, expected.keys)


def test_t50_ranks_agree_on_what_a_stream_leaves_out(tiny_llama_dir, stream, monkeypatch):
    buffer = {"num_prompts": 5, "num_minibatches": 2}
    whole = iterate(streamed(tiny_llama_dir, stream, buffer=buffer), 3)
    monkeypatch.setattr(datamodule, "num_replicas", lambda: 2)
    found, positions = {}, []
    for rank in (0, 1):
        monkeypatch.setattr(datamodule, "replica", lambda rank=rank: rank)
        data = streamed(tiny_llama_dir, stream, buffer=buffer)
        for number, batch in enumerate(iterate(data, 3)):
            rows = zip(batch.indices.tolist(), batch.records, strict=True)
            found |= {(number, index): record for index, record in rows}
        positions.append(data.position)
    expected = {
        (number, index): record
        for number, batch in enumerate(whole)
        for index, record in enumerate(batch.records)
    }
    assert found == expected
    assert len(set(positions)) == 1


def test_duplicates_are_left_out_on_request(tiny_llama_dir):
    data = attached(tiny_llama_dir, prompts=[*PROMPTS, *PROMPTS], deduplicate="exact")
    assert (len(data.train_set), data.train_set.num_duplicates) == (10, 10)
    assert len(attached(tiny_llama_dir, prompts=[*PROMPTS, *PROMPTS]).train_set) == 20


# Held-out prompts


def test_a_share_can_be_held_out_by_hash(tiny_llama_dir, caplog):
    texts = [
        f"{a} {b} {c}" for a in ("the", "a") for b in ("cat", "dog") for c in ("sat", "ran", "no")
    ]
    data = attached(tiny_llama_dir, prompts=texts, val_share=0.4)
    held_out = [record.text for record in data.val_set.records]
    trained = [record.text for record in data.train_set.records]
    assert sorted(held_out + trained) == sorted(texts)
    assert held_out == [raw.prompt for raw in SplitPrompts(texts, "validation", 0.4).read()]
    assert "held-out prompts also stand" not in caplog.text


def test_held_out_prompts_that_are_trained_on_are_warned_about(tiny_llama_dir, caplog):
    attached(tiny_llama_dir, val_prompts=["the tree", PROMPTS[3]])
    assert "1 of 2 held-out prompts also stand among the training prompts" in caplog.text
    assert PROMPTS[3] in caplog.text


def test_held_out_prompts_come_once_each_with_the_same_keys_every_time(tiny_llama_dir):
    data = attached(tiny_llama_dir, val_prompts=PROMPTS[:5], val_batch_size=2)
    first, again = list(data.val_dataloader()), list(data.val_dataloader())
    assert [len(batch) for batch in first] == [2, 2, 1]
    assert torch.equal(torch.cat([b.indices for b in first]), torch.arange(5))
    iterate(data)
    later = list(data.val_dataloader())
    for batches in (again, later):
        assert [b.keys.tolist() for b in batches] == [b.keys.tolist() for b in first]
    training = {key for batch in keys(data, 3) for key in batch}
    assert not training & {key for batch in first for key in batch.keys.tolist()}


def test_t50_a_rank_without_held_out_prompts_has_one_empty_batch(tiny_llama_dir, monkeypatch):
    monkeypatch.setattr(datamodule, "num_replicas", lambda: 2)
    monkeypatch.setattr(datamodule, "replica", lambda: 1)
    batches = list(attached(tiny_llama_dir, val_prompts=["no"]).val_dataloader())
    assert [len(batch) for batch in batches] == [0]


def test_no_held_out_prompts_switch_validation_off_and_nothing_else(tiny_llama_dir):
    data = attached(tiny_llama_dir)
    assert data.trainer.limit_val_batches == 0
    assert data.val_dataloader() == []
    data.teardown("fit")
    assert data.trainer.limit_val_batches == 1.0
    for stage in ("validate", "test", "predict"):
        with pytest.raises(ConfigError, match=f"`{stage}` answers held-out prompts"):
            attached(tiny_llama_dir, stage=stage)


def test_a_replay_switches_validation_off_and_on_again(monkeypatch):
    monkeypatch.setattr(replay_datamodule, "load_buffer", lambda path: None)
    data = ReplayDataModule("buffer.pt")
    data.trainer = SimpleNamespace(limit_val_batches=7)
    for _ in range(2):  # a fit that failed is not torn down
        data.setup("fit")
    assert data.trainer.limit_val_batches == 0
    data.teardown("fit")
    assert data.trainer.limit_val_batches == 7


def test_a_setting_of_the_trainer_that_was_not_touched_is_left_alone(tiny_llama_dir):
    data = attached(tiny_llama_dir, val_prompts=["no"])
    data.trainer.limit_val_batches = 3
    data.teardown("fit")
    assert data.trainer.limit_val_batches == 3


def test_a_module_that_cannot_collect_is_named():
    data = RolloutDataModule(PROMPTS)
    data.trainer = SimpleNamespace(lightning_module=torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"`collect`.*got Linear"):
        data.setup("fit")
