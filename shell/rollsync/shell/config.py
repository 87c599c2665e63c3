"""Reads a configuration file into a `MasterConfig`, or says which setting is wrong and why."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import yaml
from msgspec import yaml as msgspec_yaml
from msgspec.structs import replace

from rollsync.pure.config import MasterConfig, impossible
from rollsync.shell.errors import RollsyncError

_MSGSPEC_PATH = re.compile(r"^(?P<reason>.*?) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)

_SCALARS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")
)


class ConfigError(RollsyncError):
    """A configuration file that cannot be used. `paths` names the settings at fault."""

    def __init__(self, message: str, *, remedy: str = "", paths: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.paths = paths


def read_config(file: Path) -> MasterConfig:
    """Decode `file` (YAML) strictly and check its combinations.

    Raises:
        ConfigError: unreadable, not YAML, an unknown key, a wrong type, an impossible combination.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {file}: {error.strerror}",
            remedy="give the path of a YAML file",
        ) from error
    return parse_config(text, source=str(file))


def at_address(config: MasterConfig, address: str | None) -> MasterConfig:
    """`config` on the cluster that a command line names; None leaves it as it is.

    Raises:
        ConfigError: no run can be at this address.
    """
    if address is None:
        return config
    moved = replace(config, cluster=replace(config.cluster, address=address or None))
    wrong = impossible(moved)
    if wrong:
        raise ConfigError(
            f"--address {address}: {wrong[0].reason}",
            remedy="give another address",
            paths=(wrong[0].path,),
        )
    return moved


def parse_config(text: bytes, *, source: str) -> MasterConfig:
    """Decode YAML bytes; `source` names them in errors. Raises as `read_config` does."""
    try:
        _look_through(text, source)
        config = msgspec_yaml.decode(text, type=MasterConfig)
    except msgspec.ValidationError as error:
        found = _MSGSPEC_PATH.match(str(error))
        path = found["path"] if found else ""
        reason = found["reason"] if found else str(error)
        if path.startswith("checkpoint_engine.engine_kwargs["):
            reason += "; an engine's options go under its name, as in {shm: {direct: true}}"
        raise ConfigError(
            f"{source}: {path or 'top level'}: {reason}",
            remedy="correct the setting; docs/operations.md lists them all",
            paths=(path,),
        ) from error
    except (msgspec.DecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"{source} is not YAML: {_in_a_line(error)}", remedy="correct the file"
        ) from error
    wrong = impossible(config)
    if wrong:
        raise ConfigError(
            f"{source}: " + "; ".join(f"{each.path}: {each.reason}" for each in wrong),
            remedy="change the settings named",
            paths=tuple(each.path for each in wrong),
        )
    return config


def _in_a_line(error: Exception) -> str:
    """What a parser of YAML says over several lines, with a picture of the place."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _look_through(text: bytes, source: str) -> None:
    """Refuse what YAML itself would take in silence, or not be able to make a value of.

    Of two equal keys it keeps the last; and what a tag promises, a text need not be.
    """
    pending: list[tuple[str, yaml.Node | None]] = [("", yaml.compose(text, yaml.SafeLoader))]
    seen: set[int] = set()  # An alias may lead back to where it stands.
    while pending:
        path, node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node, path, source)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend((path, item) for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                inner = f"{path}.{name}" if path else name
                if isinstance(key, yaml.ScalarNode) and name in keys:
                    raise ConfigError(
                        f"{source}: {inner}: given twice, again in line {key.start_mark.line + 1}",
                        remedy="leave one of them out",
                        paths=(inner,),
                    )
                keys.add(name)
                pending.append((inner, value))


def _check_scalar(node: yaml.ScalarNode, path: str, source: str) -> None:
    if node.tag not in _SCALARS:
        kind = node.tag.rpartition(":")[2]
        problem = f"{node.value!r} is read as a {kind}, which no setting is"
    else:
        try:
            yaml.constructor.SafeConstructor().construct_object(node)
            return
        except (ValueError, KeyError):
            problem = f"{node.value!r} is not what its tag {node.tag.rpartition(':')[2]} says"
    raise ConfigError(
        f"{source}: {path or 'top level'}: {problem} (line {node.start_mark.line + 1})",
        remedy="correct the value, or quote it if it is a text",
        paths=(path,),
    )
