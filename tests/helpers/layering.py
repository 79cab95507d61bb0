"""Read the source of the package and say where it breaks the rules of its layout.

The rules stand in CONTRIBUTING.md: rooms import in one direction, outside libraries come in by
their doors, private names stay at home, public names are listed, functions and files stay small.
Everything is read with `ast`, so imports inside functions and for type checkers count too.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = "ppo_lightning"

ORDER = (
    "functional configs types errors io distributed metrics models rewards data rollout "
    "diagnostics checkpointing modules callbacks studies estimate reporting cli"
)
ROOMS = ORDER.split()

# Which files may import a library, as patterns of paths inside the package.
DOORS = {
    "lightning": [
        "modules/*",
        "callbacks/*",
        "cli/*",
        "*datamodule*.py",
        "distributed/strategies*",
    ],
    "pytorch_lightning": [],  # the same library by another name; mixing the two breaks isinstance
    "transformers": ["models/*", "rollout/engines/generate.py"],
}

MAX_FUNCTION_LINES = 40  # without the docstring
MAX_FILE_LINES = 500


@dataclass(frozen=True)
class Import:
    """``from module import name as alias``, or ``import module`` with neither."""

    module: str
    name: str | None
    alias: str | None
    line: int

    @property
    def parts(self) -> list[str]:
        """The dotted path, with the name at its end."""
        return [*self.module.split("."), *([self.name] if self.name else [])]


@dataclass(frozen=True)
class Source:
    """One file of the package; `place` is its path inside the package."""

    place: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.place)

    @property
    def room(self) -> str:
        """Top-level folder or module; empty for the package's own ``__init__.py``."""
        first = Path(self.place).parts[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @property
    def imports(self) -> list[Import]:
        return [found for node in ast.walk(self.tree) for found in self._imports_of(node)]

    @property
    def typing_lines(self) -> set[int]:
        """Lines that only a type checker reads."""
        blocks = [node for node in ast.walk(self.tree) if isinstance(node, ast.If)]
        guarded = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
        return {line for node in guarded for line in range(node.lineno, node.end_lineno + 1)}

    def _imports_of(self, node: ast.AST) -> list[Import]:
        if isinstance(node, ast.Import):
            return [Import(name.name, None, None, node.lineno) for name in node.names]
        if isinstance(node, ast.ImportFrom):
            module = self._absolute(node)
            return [Import(module, n.name, n.asname or n.name, node.lineno) for n in node.names]
        return []

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = [PACKAGE, *Path(self.place).parts]
        return ".".join([*here[: -node.level], *([node.module] if node.module else [])])


def sources(package: Path) -> list[Source]:
    """Return every Python file below the folder ``package``."""
    return [
        Source(file.relative_to(package).as_posix(), file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    ]


def violations(package: Path) -> list[str]:
    """Return one line for each breach of the layout rules in the package at ``package``."""
    rules = [_unknown_room, _direction, _doors, _private_names, _public_list]
    return [line for source in sources(package) for rule in rules for line in rule(source)]


def oversize(folder: Path, allowed: dict[str, str]) -> list[str]:
    """Return one line for each function or file in ``folder`` that is too long.

    Args:
        folder: Where to look.
        allowed: Reasons by ``path`` or ``path:function``, for those that may be long.
    """
    found = [line for source in sources(folder) for line in _long_parts(source)]
    return [line for line in found if line.split(" ")[0] not in allowed]


def _unknown_room(source: Source) -> Iterator[str]:
    if source.room and source.room not in ROOMS:
        yield f"{source.place}: `{source.room}` is not in the list of rooms"


def _direction(source: Source) -> Iterator[str]:
    """A room imports only itself and rooms before it; the package's own init loads none."""
    for found in source.imports:
        if found.parts[0] != PACKAGE or found.parts[1:2] == ["__version__"]:
            continue
        target = found.parts[1] if len(found.parts) > 1 else ""
        if target not in ROOMS:
            yield f"{source.place}:{found.line}: `{target}` is no room; name the room in full"
        elif source.room in ROOMS and ROOMS.index(target) > ROOMS.index(source.room):
            yield f"{source.place}:{found.line}: `{source.room}` must not import `{target}`"
        elif source.room == "" and found.line not in source.typing_lines:
            yield f"{source.place}:{found.line}: importing the package must not load `{target}`"


def _doors(source: Source) -> Iterator[str]:
    for found in source.imports:
        patterns = DOORS.get(found.parts[0])
        if patterns is not None and not any(fnmatch(source.place, p) for p in patterns):
            yield f"{source.place}:{found.line}: `{found.parts[0]}` may not be imported here"


def _private_names(source: Source) -> Iterator[str]:
    for found in source.imports:
        private = [p for p in found.parts[2:] if p.startswith("_") and not p.startswith("__")]
        if found.parts[0] == PACKAGE and private and found.parts[1] != source.room:
            yield f"{source.place}:{found.line}: `{private[0]}` is private to `{found.parts[1]}`"


def _public_list(source: Source) -> Iterator[str]:
    """A folder's init lists in ``__all__`` just what it re-exports, or looks up on first use."""
    if Path(source.place).name != "__init__.py":
        return
    listed = _all_of(source.tree)
    exported = {i.alias for i in source.imports if i.alias and i.parts[0] == PACKAGE}
    if listed is None:
        if exported or len(Path(source.place).parts) == 2:
            yield f"{source.place}: no `__all__`, a literal list of the room's public names"
        return
    bound = exported | _defined(source.tree)
    for name in sorted(exported - listed):
        yield f"{source.place}: imports `{name}` but does not list it in `__all__`"
    for name in sorted(listed - bound if "__getattr__" not in bound else ()):
        yield f"{source.place}: `__all__` lists `{name}`, which is not there"


def _all_of(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and _names_of(node) == {"__all__"}:
            return set(ast.literal_eval(node.value))
    return None


def _defined(tree: ast.Module) -> set[str]:
    """Names bound at the top level, imports of other libraries left out."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= _names_of(node)
    return names


def _names_of(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _long_parts(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{source.place} has {lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _length(node)
            if length > MAX_FUNCTION_LINES:
                where = f"{source.place}:{node.name}"
                yield f"{where} has {length} lines, more than {MAX_FUNCTION_LINES}"


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, the docstring not counted."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node, clean=False) is not None
    docstring = (first.end_lineno - first.lineno + 1) if has_docstring else 0
    return node.end_lineno - node.lineno + 1 - docstring
