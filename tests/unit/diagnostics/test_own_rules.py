"""Rules of a user's own: beside the built-in ones, and asked with care."""

import pytest

from ppo_lightning.diagnostics import (
    RULES,
    Examiner,
    Finding,
    Rule,
    RuleError,
    found,
    rules_with,
    seen,
)
from ppo_lightning.diagnostics.diagnosis import Evidence
from ppo_lightning.errors import ConfigError
from tests.helpers.courses import healthy


class Saying(Rule):
    """Returns, or raises, what it is given."""

    confirm = 1

    def __init__(self, illness, said):
        self.illness, self.said = illness, said

    def examine(self, course, limits):
        """Say it."""
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class Nameless(Rule):
    def examine(self, course, limits):
        """See nothing."""


ILL = found("ill", seen("kl_ref", 9.0))


def test_they_come_last_and_one_on_a_known_illness_takes_its_place():
    mine, other = Saying("gout", None), Saying("stalled", None)
    asked = rules_with([other, mine])
    assert asked[-2:] == (other, mine)
    assert [rule.illness for rule in asked].count("stalled") == 1
    assert len(asked) == len(RULES) + 1
    assert rules_with([]) == RULES


def test_ignored_ones_are_not_asked():
    asked = rules_with([Saying("gout", None)], ["gout", "stalled"])
    assert [rule.illness for rule in asked] == [r.illness for r in RULES if r.illness != "stalled"]
    with pytest.raises(ConfigError, match=r"`--ignore`.*did you mean `stalled`"):
        rules_with([], ["staled"], option="`--ignore`")


def test_names_are_needed_and_differ():
    with pytest.raises(ConfigError, match="Nameless has no `illness`"):
        rules_with([Nameless()])
    with pytest.raises(ConfigError, match="Saying and Saying both look for `gout`"):
        rules_with([Saying("gout", None), Saying("gout", None)])


@pytest.mark.parametrize(
    "said",
    [
        ZeroDivisionError("division by zero"),
        KeyError("kl"),
        True,
        "ill",
        Finding(severity="bad", evidence=ILL.evidence),
        Finding(severity="ill", evidence=()),
        Finding(severity="ill", evidence=ILL.evidence[0]),
        Finding(severity="ill", evidence=[*ILL.evidence]),
        Finding(severity="ill", evidence=(Evidence(metric="x", now=None),)),
    ],
    ids=repr,
)
def test_one_that_fails_is_named_and_stops_no_other(said):
    rules = (Saying("gout", said), Saying("kl_runaway", ILL))
    with pytest.raises(RuleError, match=r"the rule on `gout` \(Saying\) .* in iteration 3"):
        Examiner(rules).examine(healthy(3))
    heard = []
    examiner = Examiner(rules, on_failure=heard.append)
    assert [d.illness for d in examiner.examine(healthy(3))] == ["kl_runaway"]
    assert [type(error) for error in heard] == [RuleError]


def test_the_users_interrupt_goes_through():
    class Interrupted(Saying):
        def examine(self, course, limits):
            """Be asked when Ctrl-C comes."""
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Examiner([Interrupted("gout", None)], on_failure=print).examine(healthy(0))
