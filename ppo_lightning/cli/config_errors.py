"""What is wrong with a config, in one line and where to look in a second.

jsonargparse says it exactly, as an indented tree that quotes the whole config. Here the tree is
read, and the one branch that matters is told: file and line, the key in full, what it may be.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppo_lightning import configs
from ppo_lightning.cli.classes import argument_names, full_key, nearest_class, resolve, takes_more
from ppo_lightning.cli.config_files import find_beside, find_class, find_key
from ppo_lightning.errors import nearest, unknown_key_message

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "NoneType": "null",
    "list": "a list",
    "dict": "keys with values",
    "Mapping": "keys with values",
    "collections.abc.Mapping": "keys with values",
    "collections.abc.Sequence": "a list",
}

_MANY = 12
"""Longer lists of keys are left out where a near one is named."""

_DEFAULTS = {
    "model": "ppo_lightning.modules.PPOModule",
    "data": "ppo_lightning.rollout.RolloutDataModule",
}
_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}

_UNKNOWN = re.compile(
    r"(?:Group '(?P<group>[^']+)' does not accept option|Subcommand '\w+' does not accept option"
    r"|Option|ambiguous option:|unrecognized arguments:) (?:--|')(?P<key>[\w.+-]+)"
)
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.+)")
_NO_CLASS = re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'")
_NO_MODULE = re.compile(r"No module named '(?P<module>[^']+)'")
_NO_PATH = re.compile(r"Expected a dot import path string: (?P<path>\S+)")
_NO_MAPPING = re.compile(
    r"'\w+' object has no attribute 'keys'|argument of type '\w+' is not iterable"
)
_WRONG_CLASS = re.compile(
    r"Import path (?P<path>\S+) does not correspond to a subclass of (?P<base>.+)"
)


@dataclass(frozen=True)
class Problem:
    """The branch of jsonargparse's message that matters.

    Args:
        text: What is wrong, in jsonargparse's words.
        expected: What would have been right, in words; empty where ``text`` says more.
        steps: The way there: keys, and ``class:PATH`` where the arguments of a class begin.
        value: What stands there instead, if the message has it.
    """

    text: str
    expected: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    value: str | None = None

    @property
    def owner(self) -> str | None:
        """Import path of the innermost class on the way."""
        paths = [step.removeprefix("class:") for step in self.steps if step.startswith("class:")]
        return paths[-1] if paths else None

    @property
    def keys(self) -> list[str]:
        """Keys below ``owner``."""
        keys: list[str] = []
        for step in self.steps:
            keys = [] if step.startswith("class:") else [*keys, *step.split(".")]
        return keys


def explain(
    message: str, *, command: str, known_keys: Sequence[str] = (), files: Sequence[Path] = ()
) -> str:
    """Say what is wrong, and where to look.

    Args:
        message: Of jsonargparse.
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        known_keys: Keys that the command takes, in full.
        files: Config files that were read, later ones overriding.
    """
    problem = read_message(message)
    told = (
        _unknown_key(problem, known_keys, files)
        or _missing(problem, command, files)
        or _bad_class(problem, files)
        or _bad_value(problem, files)
    )
    return f"{told}\n{_where_to_look(problem, command)}"


def reason(message: str) -> str:
    """Return what a class said when it refused its arguments, out of jsonargparse's message."""
    problem = read_message(message)
    return problem.text or message


# ---------------------------------------------------------------------- reading the tree


def read_message(message: str) -> Problem:
    """Find the branch that matters in a message of jsonargparse."""
    return _read([line for line in message.splitlines() if line.strip()])


def _read(lines: Sequence[str]) -> Problem:
    head = lines[0].strip().removeprefix("- ") if lines else ""
    if head.startswith("Expected a path but") and len(lines) > 1:
        return _read(lines[1:])  # the value was tried as a file first
    if found := re.match(r'Parser key "(.+?)":(.*)$', head):
        inner = _read([found[2], *lines[1:]] if found[2].strip() else lines[1:])
        return replace(inner, steps=(found[1], *inner.steps))
    if found := re.match(r"Problem with given class_path '(.+)':$", head):
        inner = _read(lines[1:])
        return replace(inner, steps=(f"class:{found[1]}", *inner.steps))
    if head.startswith("Does not validate against any of the Union subtypes"):
        return _read_union(lines[1:])
    if found := re.match(
        r"Expected an? (<class .+?>|typing\.Literal\[.+?\])(?:\. Got value: (.*))?$", head
    ):
        return Problem(head, expected=(_type_in_words(found[1]),), value=found[2])
    if head.startswith("Not of type Path:"):
        return Problem(head, expected=("a path",))
    if found := re.match(r"Not a valid subclass of (\w+)", head):
        section = hasattr(configs, found[1]) or found[1] == "RewardTerm"
        wish = _TYPES["dict"] if section else f"a `class_path` of a {found[1]}"
        return Problem(head, expected=(wish,))
    if _NO_MAPPING.match(head):
        return Problem(head, expected=(_TYPES["dict"],))
    return Problem(head)


def _read_union(lines: Sequence[str]) -> Problem:
    """Take the alternative that went furthest, or gather what would have been right."""
    branches = [_read(branch) for branch in _bullets(lines)]
    furthest = max(branches, key=lambda branch: len(branch.steps), default=Problem(""))
    if furthest.steps:
        return furthest
    for branch in branches:
        if not branch.expected:
            return branch
    expected = tuple(dict.fromkeys(word for branch in branches for word in branch.expected))
    given = [line.split(":", 1)[1].strip() for line in lines if "Given value:" in line]
    return Problem("", expected=expected, value=given[-1] if given else None)


def _bullets(lines: Sequence[str]) -> Iterator[list[str]]:
    """Cut the list below ``Errors:`` into its items."""
    start = next((i for i, line in enumerate(lines) if line.strip() == "Errors:"), len(lines)) + 1
    depth = _indent(lines[start]) if start < len(lines) else 0
    item: list[str] = []
    for line in lines[start:]:
        if _indent(line) < depth:
            break
        if _indent(line) == depth and item:
            yield item
            item = []
        item.append(line)
    if item:
        yield item


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _type_in_words(name: str) -> str:
    if name.startswith("typing.Literal"):
        choices = ast.literal_eval(name.removeprefix("typing.Literal"))
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    plain = name.removeprefix("<class '").removesuffix("'>")
    return _TYPES.get(plain, f"a {plain.rpartition('.')[2]}")


# ---------------------------------------------------------------------- telling it


def _unknown_key(problem: Problem, known_keys: Sequence[str], files: Sequence[Path]) -> str | None:
    found = _UNKNOWN.match(problem.text)
    if found is None:
        stray = re.match(r"unrecognized arguments: (.+)", problem.text)
        return stray and f"unexpected argument `{stray[1].split()[0]}`."
    if "before subcommand" in problem.text:
        return (
            f"`{found['key']}` comes before the command: write the command first, as in "
            "`ppo-lightning fit --config FILE`."
        )
    path = [*problem.keys, *(found["group"] or "").split("."), *found["key"].split(".")]
    path = [key for key in path if key]
    depth, candidates = _first_unknown(problem.owner, path, known_keys)
    outside = problem.steps[: len(problem.steps) - len(_own_steps(problem))]
    where = full_key([*outside, *path[:depth]])
    key = full_key([*outside, *path[: depth + 1]])
    message = _unknown_message(path[depth], candidates, where)
    certain = () if problem.owner and takes_more(problem.owner) else candidates
    return f"{find_key(files, key)}{message}{_also_unknown(key, certain, files)}"


def _first_unknown(
    owner: str | None, path: Sequence[str], known_keys: Sequence[str]
) -> tuple[int, list[str]]:
    """Find the first key that does not exist where it stands, and those that do."""
    candidates: list[str] = []
    for depth, key in enumerate(path):
        above = path[:depth]
        found = argument_names(owner, above) if owner else _children(known_keys, ".".join(above))
        if found and key not in found:
            return depth, found
        candidates = found
    return len(path) - 1, candidates


def _own_steps(problem: Problem) -> tuple[str, ...]:
    """Steps behind the innermost class."""
    places = [i for i, step in enumerate(problem.steps) if step.startswith("class:")]
    return problem.steps[places[-1] + 1 :] if places else problem.steps


def _unknown_message(key: str, candidates: Sequence[str], where: str) -> str:
    place = f"`{where}`" if where else "the config"
    if home := _home_of(key, where):
        return f"unknown key `{key}` in {place}; did you mean `{home}.{key}`?"
    near = nearest(key, candidates)
    if near and len(candidates) > _MANY:
        return f"unknown key `{key}` in {place}; did you mean `{near}`?"
    return unknown_key_message(key, candidates, place)


def _also_unknown(key: str, candidates: Sequence[str], files: Sequence[Path]) -> str:
    """Name further unknown keys beside the first, which is all that jsonargparse looks for."""
    told = []
    for entry in find_beside(files, key) if candidates else ():
        name = entry.keys[-1]
        if name.partition(".")[0].removesuffix("+") not in (*candidates, *_CLASS_KEYS, "<<"):
            near = nearest(name, candidates)
            told.append(f"`{name}` in line {entry.line}{f' (`{near}`?)' if near else ''}")
    return f" Unknown there, too: {', '.join(told)}." if told else ""


def _home_of(key: str, where: str) -> str | None:
    """Return where a key belongs that stands at the top or right below ``model`` or ``data``."""
    for section, owner in _DEFAULTS.items():
        if where in ("", section) and key in argument_names(owner):
            return f"{section}.init_args"
    return None


def _children(known_keys: Sequence[str], where: str) -> list[str]:
    """List the keys right below one, among keys in full."""
    head = f"{where}." if where else ""
    below = [key.removeprefix(head).split(".")[0] for key in known_keys if key.startswith(head)]
    return list(dict.fromkeys(below))


def _missing(problem: Problem, command: str, files: Sequence[Path]) -> str | None:
    found = _REQUIRED.match(problem.text)
    if found is None:
        return None
    names = [name.removeprefix(f"{command}.") for name in found["names"].split(", ")]
    listed = ", ".join(f"`{full_key([*problem.steps, name])}`" for name in names)
    place = find_class(files, problem.owner) if problem.owner else ""
    return f"{place}{listed} must be set."


def _bad_class(problem: Problem, files: Sequence[Path]) -> str | None:
    text = problem.text
    if found := _WRONG_CLASS.match(text):
        place = find_class(files, found["path"])
        key = full_key(problem.steps)
        return f"{place}`{found['path']}` is not a {found['base']}, as `{key}` must be."
    path, why = problem.owner or "", ""
    if found := _NO_CLASS.match(text):
        path = path or f"{found['module']}.{found['name']}"
        why = f"`{found['module']}` has no `{found['name']}`"
    elif found := _NO_MODULE.match(text):
        missing = found["module"]
        why = (
            f"`{path}` cannot be imported: there is no module `{missing}`. Install it, or add its "
            "folder to PYTHONPATH"
        )
    elif found := _NO_PATH.match(text):
        path = found["path"]
        why = f"`{path}` is not known; give the class with its module, as `package.module.Class`"
    if not why:
        return None
    near = nearest_class(path)
    hint = f"; did you mean `{near}`?" if near and near != path else "."
    return f"{find_class(files, path)}{why}{hint}"


def _bad_value(problem: Problem, files: Sequence[Path]) -> str:
    key = full_key(problem.steps)
    place = find_key(files, key, problem.value)
    if not problem.expected:
        return f"{place}`{key}`: {problem.text}" if key else problem.text
    if problem.steps in (("model",), ("data",)) and (misplaced := _misplaced(problem.value)):
        return f"{place}unknown key `{misplaced}` in `{key}`; put it below `{key}.init_args`."
    got = "" if problem.value is None else f", got `{problem.value}`"
    wish = " or ".join(problem.expected)
    return f"{place}`{key}` must be {wish}{got}.{_hint_for(problem)}"


def _misplaced(value: str | None) -> str | None:
    """Return the key that stands beside ``class_path`` instead of in ``init_args``."""
    try:
        section = ast.literal_eval(value or "")
    except (ValueError, SyntaxError):
        return None
    keys = section if isinstance(section, dict) else {}
    return next((str(key) for key in keys if key not in _CLASS_KEYS), None)


def _hint_for(problem: Problem) -> str:
    value = problem.value or ""
    choices = re.findall(r"`(.+?)`", " ".join(problem.expected))
    if choices:
        near = nearest(value, choices)
        return f" Did you mean `{near}`?" if near else ""
    if "a whole number" in problem.expected and re.fullmatch(r"[-+.\deE]+", value):
        number = float(value)
        return f" Write {int(number)}." if number == int(number) else ""
    return ""


def _where_to_look(problem: Problem, command: str) -> str:
    section = problem.steps[0].split(".")[0] if problem.steps else ""
    option = "--help"
    if section in ("model", "data"):
        default = _DEFAULTS[section].rpartition(".")[2]
        known = [
            step.removeprefix("class:")
            for step in problem.steps[1:2]
            if step.startswith("class:") and resolve(step.removeprefix("class:"))
        ]
        option = f"--{section}.help {known[0] if known else default}"
    return f"`ppo-lightning {command} {option}` lists the settings."
