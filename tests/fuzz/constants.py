"""Which constants of a launch's records Triton 3.6 forgets: a model of its front end, for any Triton.

A variable of records is cloned at each branch and loop, by its type, which has the constants in it. A function builds
its arguments leaf by leaf, numbers before constants, and whenever a record is given a leaf, its type is made anew from
what the records in it are by then (``tuple._setitem``). Where those get constants afterwards and the record around them
nothing more, its type has None in their places, and after a branch so has the variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[int, ...]


class _Record:
    """A record as a function sees it; types: of a record a list, of a leaf whether its constant is known."""

    def __init__(self, types: list[Any]) -> None:
        self.types = types
        self.fields = [_Record(each) if isinstance(each, list) else False for each in types]

    def give(self, path: Path) -> None:
        if len(path) > 1:
            self.fields[path[0]].give(path[1:])
        else:
            self.fields[path[0]] = True
            self.types = [each.types if isinstance(each, _Record) else each for each in self.fields]


def forgotten(arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> set[str]:
    """The constants that are taken for None and are not, by name; arguments: ``Specialisation.tree`` of a launch."""
    found = set[str]()
    for tree in arguments.values():
        if isinstance(tree, str):
            continue
        leaves, types = dict(_leaves(tree)), _known(tree)
        numbers = [path for path, name in leaves.items() if name not in constants]
        known = [path for path, name in leaves.items() if name in constants]
        # As ``launch.source_of`` orders them for a kernel, and Triton for the functions that it calls, and they call.
        for given in (sorted(known, key=lambda path: -len(path)), known, known):
            record = _Record(types)
            for path in (*numbers, *given):
                record.give(path)
            types = record.types
            found |= {leaves[path] for path in known if not _at(types, path)}
    return {name for name in found if constants[name] is not None}


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(tree, str):
        yield path, tree
    else:
        for number, each in enumerate(tree):
            yield from _leaves(each, (*path, number))


def _known(tree: Any) -> Any:
    return isinstance(tree, str) or [_known(each) for each in tree]


def _at(types: Any, path: Path) -> Any:
    return _at(types[path[0]], path[1:]) if path else types
