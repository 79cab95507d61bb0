"""``check-reward``: any reward on good and bad answers, its words and its exit code."""

import json

import pytest

from tests.helpers.cli import run_cli

TEXTS = [
    {"prompt": f"what is number {i}", "response": f"the number {i} is a {word} and good number ."}
    for i, word in enumerate(["red", "blue", "big", "small", "happy", "sad"])
]
REWARDS = '''
import math

def order(prompts, responses):
    """Knows the texts: full marks for those that are as they should be."""
    return [float(r.startswith("the number") and r.endswith(".") and r.count(".") == 1
                  and r.split()[2] == p.split()[-1]) for p, r in zip(prompts, responses)]

def length(prompts, responses):
    return [float(len(r)) for r in responses]

def constant(prompts, responses):
    return [0.5 for r in responses]

def missing(prompts, responses):
    return [math.nan if not r else float(len(r) > 3) for r in responses]

def broken(prompts, responses):
    raise RuntimeError("no such judge")
'''


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Run the command on a function of ``REWARDS``; returns the code, what was said, the report."""
    (tmp_path / "judge.py").write_text(REWARDS, encoding="utf-8")
    write(tmp_path / "good.jsonl", TEXTS)

    def run(name, *options, texts=True):
        block = {
            "class_path": "ppo_lightning.rewards.FunctionReward",
            "init_args": {"function": f"{tmp_path / 'judge.py'}:{name}"},
        }
        (tmp_path / "reward.yaml").write_text(json.dumps(block), encoding="utf-8")
        arguments = ["--component", tmp_path / "reward.yaml", "--output", tmp_path / "report.json"]
        arguments += ["--texts", tmp_path / "good.jsonl"] if texts else []
        code = run_cli(monkeypatch, "check-reward", *arguments, "--device", "cpu", *options)
        said, report = capsys.readouterr(), tmp_path / "report.json"
        found = json.loads(report.read_text()) if report.is_file() else None
        return code, said.out + said.err, found

    run.folder = tmp_path
    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_a_reward_that_sees_everything_passes(check):
    code, said, report = check("order")
    assert code == 0
    assert [kind["share"] for kind in report["kinds"]] == [1.0] * 6
    assert [kind["ok"] for kind in report["kinds"]] == [True] * 6
    assert "worst of" not in said


def test_one_that_counts_letters_fails_and_says_what_it_prefers(check):
    code, said, report = check("length", "--perturb", "shuffled", "repeated", "empty")
    assert code == 1
    shares = {kind["kind"]: kind["share"] for kind in report["kinds"]}
    assert shares == {"shuffled": 0.0, "repeated": 0.0, "empty": 1.0}
    assert "warning: The reward prefers `repeated` answers to good ones" in said
    assert "warning: The reward prefers longer texts" in said
    assert "worst of repeated: prompt 'what is number" in said
    assert said.count("worst of repeated") == 2


def test_a_constant_and_a_missing_score_are_said(check):
    code, said, _ = check("constant", "--perturb", "echo")
    assert code == 1
    assert "Every text has the same score, 0.5" in said
    code, said, report = check("missing", "--perturb", "empty")
    assert code == 1
    assert "6 of 12 scores are NaN or infinite" in said
    assert report["kinds"][0]["unscored"] == 6


def test_the_users_own_pairs_are_a_kind_of_their_own(check):
    pairs = [
        {"prompt": "what is number 3", "chosen": "the number 3 .", "rejected": ["no", "yes"]},
        {
            "messages": [{"role": "user", "content": "what is number 4"}],
            "chosen": [{"role": "assistant", "content": "the number 4 ."}],
            "rejected": "four",
        },
    ]
    file = write(check.folder / "pairs.jsonl", pairs)
    code, said, report = check("order", "--pairs", file, texts=False)
    assert code == 0
    (kind,) = report["kinds"]
    assert (kind["kind"], kind["pairs"], kind["share"]) == ("pairs", 3, 1.0)
    assert "3 pairs are few for `pairs`" in said


def test_chats_are_given_to_the_reward_as_chats(check):
    chats = [
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": f"what is number {i}"},
                {"role": "assistant", "content": f"the number {i} is good and big ."},
            ]
        }
        for i in range(3)
    ]
    write(check.folder / "good.jsonl", chats)
    code, _, report = check("order", "--perturb", "off-topic", "truncated")
    assert code == 0
    assert [kind["pairs"] for kind in report["kinds"]] == [3, 3]


def test_short_answers_are_skipped_and_counted(check):
    rows = [*TEXTS, {"prompt": "what is number 7", "response": "seven"}]
    write(check.folder / "good.jsonl", rows)
    _, _, report = check("order", "--perturb", "shuffled", "--limit", "7")
    assert (report["kinds"][0]["pairs"], report["kinds"][0]["skipped"]) == (6, 1)
    _, _, report = check("order", "--perturb", "shuffled", "--limit", "2")
    assert report["kinds"][0]["pairs"] == 2


def test_the_bound_and_the_seed_are_the_users(check):
    write(check.folder / "good.jsonl", [*TEXTS, {"prompt": "number", "response": "wrong it is"}])
    assert check("order", "--perturb", "shuffled")[0] == 0  # 6 of 7
    assert check("order", "--perturb", "shuffled", "--min-separation", "0.9")[0] == 1
    first = check("length", "--perturb", "off-topic", "--seed", "1")[2]
    assert first == check("length", "--perturb", "off-topic", "--seed", "1")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-separation", "0"], r"`--min-separation` must lie in (0, 1]"),
        (["--limit", "0"], "`--limit` must be at least 1"),
        (["--perturb", "upside-down"], "invalid choice"),
        (["--pairs", "no_such.jsonl"], "no_such.jsonl"),
        (["some/model"], "give either a reward model or `--component FILE`"),
    ],
)
def test_bad_input_ends_with_two_and_the_way_out(check, options, message):
    code, said, _ = check("order", *options)
    assert code == 2
    assert message in said


def test_texts_without_a_prompt_are_named_by_line(check):
    write(check.folder / "good.jsonl", [*TEXTS, {"text": "just a text"}])
    code, said, _ = check("order")
    assert code == 2
    assert "good.jsonl:7" in said
    assert "give `prompt` and `response`, or `messages`" in said


def test_without_texts_or_with_a_broken_reward_it_ends_with_two(check):
    assert check("order", texts=False)[0] == 2
    code, said, report = check("broken")
    assert code == 2
    assert "no such judge" in said
    assert report is None


def test_a_reward_model_may_be_checked_by_its_path(check, tiny_reward_dir, monkeypatch, capsys):
    texts = check.folder / "good.jsonl"
    arguments = [tiny_reward_dir, "--texts", texts, "--device", "cpu", "--perturb", "empty"]
    assert run_cli(monkeypatch, "check-reward", *arguments) in (0, 1)
    assert "empty            6       0" in capsys.readouterr().out
