"""Signs become diagnoses: confirmed, remembered, told as companions, over."""

import json
import math

import pytest

from ppo_lightning.diagnostics import (
    RULES,
    Course,
    Diagnosis,
    Evidence,
    Examiner,
    Finding,
    Rule,
    RuleLimits,
    headline,
    notice,
)
from ppo_lightning.diagnostics.course import FIRST, RECENT, keep
from tests.helpers.courses import gold, healthy, run


class Scripted(Rule):
    """Sees what the script says, by iteration."""

    def __init__(self, illness, script, *, confirm=2, lasting=None):
        self.illness, self.script = illness, script
        self.confirm, self.lasting = confirm, lasting

    def examine(self, course, limits):
        """Say the next word of the script."""
        severity = self.script.get(course.now.iteration)
        if severity is None:
            return None
        number = float(course.now.iteration)
        return Finding(severity=severity, evidence=(Evidence(metric="x", now=number),))


def told(examiner, iterations):
    """Illness and severity after each iteration."""
    return [[(d.illness, d.severity) for d in examiner.examine(healthy(i))] for i in iterations]


def ills(*iterations, severity="ill"):
    return dict.fromkeys(iterations, severity)


def test_one_sign_is_watched_and_two_of_three_are_an_illness():
    examiner = Examiner([Scripted("a", ills(1, 3, 4))])
    found = told(examiner, range(5))
    assert found == [[], [("a", "watch")], [("a", "watch")], [("a", "ill")], [("a", "ill")]]
    assert examiner.diagnoses()[0].since == 1
    assert examiner.diagnoses()[0].iteration == 4


def test_signs_that_are_far_apart_do_not_add_up():
    found = told(Examiner([Scripted("a", ills(1, 4, 7))]), range(8))
    assert [d[0][1] for d in found if d] == ["watch"] * 7


def test_what_is_critical_counts_at_once():
    found = told(Examiner([Scripted("a", ills(2, severity="critical"))]), range(3))
    assert found[2] == [("a", "critical")]


def test_an_illness_is_over_after_some_calm_iterations_and_comes_again_as_another():
    examiner = Examiner([Scripted("a", ills(0, 1, 9, 10))], clear_after=3)
    found = told(examiner, range(11))
    assert [bool(d) for d in found] == [True] * 4 + [False] * 5 + [True] * 2
    assert [(e.since, e.until) for e in examiner.episodes] == [(0, 4), (9, None)]
    assert [d.since for d in examiner.summary()] == [0]


def test_signs_of_watch_do_not_keep_what_was_worse():
    script = ills(0, 1) | ills(*range(2, 9), severity="watch")
    examiner = Examiner([Scripted("a", script)], clear_after=3)
    assert [d[0][1] for d in told(examiner, range(9))] == [
        "watch", *["ill"] * 3, *["watch"] * 5
    ]  # fmt: skip
    assert [(e.severity, e.since, e.until) for e in examiner.episodes] == [
        ("ill", 0, 4), ("watch", 4, None)
    ]  # fmt: skip


@pytest.mark.parametrize(("later", "severity", "leading"), [
    (range(2, 12), "ill", "update_too_large"), (range(7, 12), "ill", "stalled"),
    (range(2, 12), "critical", "stalled"),
])  # fmt: skip
def test_what_is_over_does_not_account_for_what_came_after_or_is_worse(later, severity, leading):
    rules = [Scripted("update_too_large", ills(0, 1), confirm=1),
             Scripted("stalled", ills(*later, severity=severity), confirm=1)]  # fmt: skip
    examiner = Examiner(rules)
    told(examiner, range(12))
    assert examiner.summary()[0].illness == leading


def test_of_two_the_one_that_was_confirmed_first_leads():
    hacked = ills(0, 1, 2, 3, severity="watch") | ills(4, 5, 6)
    rules = [Scripted("reward_hacking", hacked), Scripted("entropy_collapse", ills(*range(1, 7)))]
    examiner = Examiner(rules)
    told(examiner, range(7))
    assert examiner.diagnoses()[0].illness == "entropy_collapse"


def test_a_jump_lasts():
    rule = Scripted("a", ills(1), confirm=1, lasting="ill")
    assert told(Examiner([rule]), range(20))[-1] == [("a", "ill")]
    watched = Scripted("a", ills(1, severity="watch"), confirm=1, lasting="ill")
    assert told(Examiner([watched]), range(20))[-1] == []
    lesser = Scripted("a", ills(1), confirm=1, lasting="critical")
    assert told(Examiner([lesser]), range(20))[-1] == []


def test_the_worse_leads_and_then_the_cause():
    rules = [Scripted("b", ills(0, 1)), Scripted("a", ills(0, 1)),
             Scripted("c", ills(1, severity="critical"))]  # fmt: skip
    found = told(Examiner(rules), range(2))[-1]
    assert [name for name, _ in found] == ["c", "b", "a"]


def pair(first, second):
    """Two illnesses, and the iterations of their signs."""
    return Examiner([Scripted(name, ills(*at), confirm=1) for name, at in (first, second)])


def test_what_an_illness_accounts_for_is_its_companion():
    examiner = pair(("reward_hacking", (1,)), ("kl_runaway", (0, 1)))
    told(examiner, range(2))
    leading, other = examiner.diagnoses()
    assert (leading.illness, leading.companion_of) == ("reward_hacking", None)
    assert (other.severity, other.companion_of) == ("watch", "reward_hacking")


def test_the_one_that_leads_is_as_bad_as_its_companions():
    signs = {"reward_hacking": ills(1, 2), "kl_runaway": ills(1) | ills(2, severity="critical")}
    examiner = Examiner([Scripted(name, script, confirm=1) for name, script in signs.items()])
    severities = [dict(severities) for severities in told(examiner, range(3))]
    assert severities[1] == {"reward_hacking": "ill", "kl_runaway": "watch"}
    assert severities[2] == {"reward_hacking": "critical", "kl_runaway": "watch"}
    leading, _ = examiner.summary()
    assert (leading.illness, leading.severity) == ("reward_hacking", "critical")


@pytest.mark.parametrize(
    ("signal", "critic", "leading"),
    [
        (0, 3, "no_reward_signal"),
        (3, 0, "critic_failure"),
        (0, 1, "no_reward_signal"),
        (1, 0, "no_reward_signal"),  # together: causes come first among the rules
    ],
)
def test_of_two_that_account_for_each_other_the_earlier_leads(signal, critic, leading):
    examiner = pair(("no_reward_signal", range(signal, 5)), ("critic_failure", range(critic, 5)))
    told(examiner, range(5))
    first, second = examiner.diagnoses()
    assert first.illness == leading
    assert second.companion_of == leading


def test_in_a_circle_of_illnesses_one_leads():
    names = {"over_optimisation": 0, "entropy_collapse": 5, "reward_hacking": 10}
    examiner = Examiner(
        [Scripted(name, ills(*range(at, 12)), confirm=1) for name, at in names.items()]
    )
    told(examiner, range(12))
    found = {d.illness: d.companion_of for d in examiner.diagnoses()}
    assert found == {
        "reward_hacking": None,
        "over_optimisation": "reward_hacking",
        "entropy_collapse": "reward_hacking",
    }


def test_what_is_only_watched_has_no_companions():
    examiner = Examiner([Scripted("reward_hacking", ills(1, severity="watch")),
                         Scripted("kl_runaway", ills(0, 1))])  # fmt: skip
    told(examiner, range(2))
    assert examiner.diagnoses()[0].illness == "kl_runaway"


def test_evidence_is_of_the_worst_moment_and_of_its_latest():
    script = ills(0, 1, 2) | ills(3, severity="watch")
    examiner = Examiner([Scripted("a", script)])
    told(examiner, range(4))
    assert examiner.diagnoses()[0].evidence[0].now == 2


@pytest.mark.parametrize("cut", [0, 1, 3, 6, 11])
def test_a_resumed_examination_goes_on(cut):
    rows = run(14, kl_old=lambda i: 0.3 if i == 4 else 0.004, kl_ref=lambda i: 1.5 * i)
    whole, first, second = Examiner(), Examiner(), Examiner()
    expected = [whole.examine(row) for row in rows]
    found = [first.examine(row) for row in rows[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.examine(row) for row in rows[cut:]]
    assert found == expected
    assert second.summary() == whole.summary()


def test_episodes_of_rules_that_are_gone_are_left_out():
    examiner = Examiner([Scripted("a", ills(0, 1))])
    told(examiner, range(2))
    other = Examiner([Scripted("b", {})])
    other.load_state_dict(examiner.state_dict())
    assert other.diagnoses() == []


def test_what_was_undone_is_forgotten():
    examiner = Examiner([Scripted("early", ills(1, 2)), Scripted("late", ills(4, 5))])
    told(examiner, range(6))
    examiner.undo_after(3)
    assert [d.illness for d in examiner.diagnoses()] == ["early"]
    assert [row.iteration for row in examiner._rows] == [0, 1, 2, 3]
    assert examiner._trained == 4
    examiner.undo_after(9)  # nothing is
    assert len(examiner._rows) == 4


def test_an_illness_is_as_bad_as_it_was_where_the_run_went_back_to():
    script = {3: "watch", 5: "critical", 7: "watch", 8: "critical"}
    examiner = Examiner([Scripted("a", script, lasting="ill")])
    told(examiner, range(6))
    state = json.loads(json.dumps(examiner.state_dict()))
    for one in (examiner, Examiner(examiner.rules)):
        one.load_state_dict(state)
        one.undo_after(4)
        (left,) = one.diagnoses()
        assert (left.severity, left.since, left.evidence[0].now) == ("watch", 3, 3)
        assert [found[0][1] for found in told(one, range(6, 9))] == ["watch", "watch", "critical"]


def test_an_illness_that_was_over_when_the_run_went_back_is_there_again():
    examiner = Examiner([Scripted("a", ills(1, 2, 9, 10))], clear_after=2)
    told(examiner, range(6))
    assert examiner.diagnoses() == []
    examiner.undo_after(2)
    assert [d.severity for d in examiner.diagnoses()] == ["ill"]
    assert told(examiner, range(6, 11))[-1] == [("a", "ill")]
    assert [(e.since, e.until) for e in examiner.episodes] == [(1, 7), (9, None)]


def test_an_illness_that_is_over_is_told_with_its_end():
    examiner = Examiner([Scripted("a", ills(0, 1))])
    told(examiner, range(9))
    assert headline(examiner.summary()) == "ill: a in iterations 0 to 1, over since 5"
    examiner = Examiner([Scripted("a", ills(1), confirm=1)])
    told(examiner, range(9))
    assert headline(examiner.summary()) == "ill: a in iteration 1, over since 5"


def test_the_level_is_a_median_of_what_is_finite():
    examiner = Examiner([])
    assert examiner.level("score_std") is None
    for i, std in enumerate((1.0, 2.0, 3.0, math.nan)):
        examiner.examine(healthy(i, score_std=std))
    assert examiner.level("score_std") == 2.5


def test_long_runs_are_judged_by_their_ends_and_their_start():
    rows = run(300, val_sampled=lambda i: gold(-abs(i - 100.0)))
    kept = keep(rows)
    numbers = [row.iteration for row in kept]
    assert numbers == [*range(FIRST), 100, 101, *range(300 - RECENT, 300)]
    assert keep(kept) == kept
    assert Course(kept, trained=300).gain == pytest.approx(Course(rows).gain)


def test_the_best_gold_score_of_a_long_run_is_that_of_two_judgements_in_a_row():
    def judged(i):
        return gold(1.0 - abs(i - 100) / 200, 0.01) if i % 10 == 0 else None

    rows = run(300, raw_score_mean=lambda i: 0.01 * i, val_sampled=judged)
    examiner = Examiner()
    for row in rows:
        examiner.examine(row)
    rule = next(r for r in RULES if r.illness == "over_optimisation")
    kept, whole = (rule.examine(Course(c), RuleLimits()) for c in (examiner._rows, rows))
    assert kept.evidence == whole.evidence
    assert kept.evidence[0].before == pytest.approx(0.975)


def test_the_start_is_that_of_the_actors_training():
    rows = run(200, actor_steps=lambda i: 0.0 if i < 50 else 8.0)
    assert [row.iteration for row in keep(rows)][:17] == [*range(8), *range(50, 58), 136]
    assert Course(rows).trained == 150


def test_words():
    evidence = (Evidence(metric="rollout/kl_ref", now=8.0, before=1.0, limit=5.0, note="ouch"),)
    found = Diagnosis(illness="kl_runaway", severity="ill", since=3, iteration=5, evidence=evidence)
    line = "kl_runaway (ill), since iteration 3: `rollout/kl_ref` went from 1 to 8 (limit 5): ouch."
    assert notice(found, advise=False) == str(found) == line
    advised = notice(found, now=healthy(5))
    assert advised.startswith(line)
    assert "`kl.coef` 0.1 → 0.4" in advised
    assert "AdaptiveKL" in advised
    assert headline([found]) == "ill: kl_runaway since iteration 3"
    assert headline([]) == "healthy"
    own = Diagnosis(illness="mine", severity="watch", since=0, iteration=0, evidence=evidence)
    assert notice(own) == str(own)
    assert headline([own]) == "healthy; to watch: mine"


def test_the_order_of_rules_is_one_of_causes():
    names = [rule.illness for rule in RULES]
    assert names.index("reward_nonfinite") < names.index("nonfinite_update")
    assert names.index("stalled") < names.index("critic_failure")
