"""What an operator can meet, read from the code: settings, metrics, errors."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path

import msgspec
from msgspec import inspect

from rollsync.pure.config import MasterConfig
from rollsync.shell.refit.engines.factory import BUILT_IN

ROOT = Path(__file__).parents[2]
_METRIC = re.compile(r"\"(rollsync_refit_\w+|rollout_checkpoint/[a-z_]+)\"")


def settings() -> dict[str, str]:
    """Dotted path of every setting, and its default as JSON; `required` where there is none."""
    return dict(_settings(inspect.type_info(MasterConfig), ""))


def engine_options() -> dict[tuple[str, str], str]:
    """By built-in checkpoint engine and option, the default as JSON."""
    return {
        (backend, option): msgspec.json.encode(parameter.default).decode()
        for backend, target in BUILT_IN.items()
        for option, parameter in signature(pkgutil.resolve_name(target)).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    }


def metrics() -> set[str]:
    """Every metric's name."""
    return {name for text in _sources().values() for name in _METRIC.findall(text)}


def errors() -> dict[str, str]:
    """Every class of `RollsyncError`, and the first line of what it says of itself."""
    classes = [
        node
        for text in _sources().values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    known = {"RollsyncError"}
    while True:
        more = {
            node.name
            for node in classes
            if any(isinstance(base, ast.Name) and base.id in known for base in node.bases)
        }
        if more <= known:
            break
        known |= more
    return {
        node.name: (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        for node in classes
        if node.name in known and node.name != "RollsyncError"
    }


def _sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "shell").rglob("*.py"))}


def _settings(of: inspect.Type, path: str) -> Iterator[tuple[str, str]]:
    for each in _structs(of):
        for field in each.fields:
            inner = f"{path}.{field.encode_name}" if path else field.encode_name
            below = list(_settings(field.type, inner))
            if below:
                yield from below
            else:
                yield inner, _default(field)


def _structs(of: inspect.Type) -> Iterator[inspect.StructType]:
    if isinstance(of, inspect.StructType):
        yield of
    elif isinstance(of, inspect.UnionType):
        for member in of.types:
            yield from _structs(member)


def _default(field: inspect.Field) -> str:
    if field.default is not msgspec.NODEFAULT:
        return msgspec.json.encode(field.default).decode()
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.json.encode(field.default_factory()).decode()
    return "required"
