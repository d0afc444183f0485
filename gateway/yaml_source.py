"""YAML text → plain values with the line of every key; duplicate keys and what is unsafe or surprising are mistakes.

Rules
- Only mappings with text keys, lists and scalars come out. Tags that make other objects are refused.
- Anchors and merge keys work; what they expand to is bounded, so that a small file never becomes a big one.
- A parse error stops at the first one, like any YAML parser; all mistakes above syntax are collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import yaml

Path = tuple[str | int, ...]
MAX_BYTES = 4 * 2**20
MAX_VALUES = 200_000
_MERGE = "tag:yaml.org,2002:merge"
_MAP = "tag:yaml.org,2002:map"
_SEQ = "tag:yaml.org,2002:seq"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake. ``path`` is where it is in the YAML; ``line`` counts from 1, None when unknown."""

    path: Path
    message: str
    line: int | None = None

    def at(self, source: Source) -> Mistake:
        """With its line, where it has none."""
        return self if self.line else replace(self, line=source.line(self.path))

    def __str__(self) -> str:
        where = dotted(self.path)
        line = f"line {self.line}" if self.line else ""
        place = f"{where} ({line})" if where and line else where or line
        return f"{place}: {self.message}" if place else self.message


def dotted(path: Path) -> str:
    """``("models", 0, "pools")`` → ``models[0].pools``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


@dataclass(slots=True)
class Source:
    """What was read."""

    data: Any = None
    mistakes: list[Mistake] = field(default_factory=list)
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int | None:
        """The line of ``path``, or of the closest thing around it that is in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def read(text: str) -> Source:
    """Parse one YAML document. Never raises; see ``Source.mistakes``."""
    source = Source()
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            source.data = _Builder(loader, source).build(node, ())
    except RecursionError:
        source.mistakes.append(Mistake((), "nests too deep to be a configuration"))
    except _TooManyError:
        source.mistakes.append(Mistake((), f"expands to more than {MAX_VALUES} values; use fewer anchors"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "malformed"
        source.mistakes.append(Mistake((), f"not valid YAML: {problem}", mark.line + 1 if mark else None))
    except (yaml.YAMLError, ValueError) as error:
        # ReaderError (a character that YAML forbids); ValueError from a scalar such as the date 2020-99-99.
        source.mistakes.append(Mistake((), f"not valid YAML: {str(error).splitlines()[0]}"))
    return source


class _TooManyError(Exception):
    pass


class _Builder:
    def __init__(self, loader: yaml.SafeLoader, source: Source) -> None:
        self._loader = loader
        self._source = source
        self._made = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._made += 1
        if self._made > MAX_VALUES:
            raise _TooManyError
        self._source.lines.setdefault(path, _line(node))
        if isinstance(node, yaml.ScalarNode):
            value = self._loader.construct_object(node)
            return node.value if isinstance(value, date) else value  # a date stays the text that it is
        if id(node) in self._open:
            return self._refuse(path, "an anchor cannot hold itself", node)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))
        return self._refuse(path, f"the tag {node.tag!r} is not allowed", node)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, int] = {}
        out: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                for base in self._bases(value_node, path):
                    merged = self._mapping(base, path) | merged
                continue
            key = self._loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = repr(key) if key is not None else "this"
                self._refuse(path, f"a key must be text, {shown} is not; put it in quotes", key_node)
                continue
            here = (*path, key)
            if key in own:
                self._refuse(here, f"duplicate key, first on line {own[key]}", key_node)
                continue
            own[key] = _line(key_node)
            self._source.lines[here] = own[key]
            out[key] = self.build(value_node, here)
        return merged | out

    def _bases(self, node: yaml.Node, path: Path) -> Iterator[yaml.MappingNode]:
        for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(base, yaml.MappingNode):
                self._refuse(path, "'<<' takes a mapping or a list of mappings", base)
            elif id(base) in self._open:
                self._refuse(path, "an anchor cannot hold itself", base)
            else:
                yield base

    def _refuse(self, path: Path, message: str, node: yaml.Node) -> None:
        self._source.mistakes.append(Mistake(path, message, _line(node)))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
