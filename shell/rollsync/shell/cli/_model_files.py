"""The tensors of a model, from whichever of its published files are there.

Reads configurations, indexes and the headers of safetensors files; no weight is read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from returns.pipeline import is_successful

from rollsync.codecs.refit import huggingface
from rollsync.pure.refit import RefitErrorValue, TensorSpec, describe
from rollsync.pure.refit.cuts import Attention
from rollsync.pure.refit.errors import HeaderMalformed, ShapesError
from rollsync.pure.refit.model_shapes import HuggingFaceConfig, attention_of, model_tensors
from rollsync.shell.errors import RollsyncError
from rollsync.shell.files import UnreadableFile, open_regular

_GIVE = (
    "give a Hugging Face config.json, a model.safetensors.index.json with its files beside it, "
    "a .safetensors file, or a directory with any of these"
)


class PlanRefused(RollsyncError):
    """A refit of this model between these workers cannot be planned.

    Args:
        error: the value that pure or the codecs refused it with.
    """

    def __init__(self, message: str, *, remedy: str = "", error: RefitErrorValue) -> None:
        super().__init__(message, remedy=remedy)
        self.error = error


class ModelFiles(Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        read_from: What the shapes were derived from, for people.
        tensors: The model's tensors in stream order.
        attention: What a configuration says of it, where there is one.
    """

    read_from: str
    tensors: tuple[TensorSpec, ...]
    attention: Attention = Attention()


def read_model(source: Path) -> ModelFiles:
    """The tensors of a model.

    Args:
        source: A directory, or one of the files in it. In a directory, safetensors files come
            before the configuration: they say what is really there.

    Raises:
        UnreadableFile: A file is missing or may not be read.
        PlanRefused: A file does not say what it should.
    """
    if source.is_dir():
        return _read_directory(source)
    if source.suffix == ".safetensors":
        return _from_headers([source], str(source))
    if source.name.endswith(".index.json"):
        return _from_index(source)
    config = _read_config(source)
    tensors = model_tensors(config)
    if not is_successful(tensors):
        raise _refused(source, tensors.failure())
    return ModelFiles(
        read_from=str(source), tensors=tensors.unwrap(), attention=attention_of(config)
    )


def _read_directory(directory: Path) -> ModelFiles:
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if files and index.exists():
        return _from_index(index)
    if files:
        return _from_headers(files, f"{len(files)} safetensors files in {directory}")
    config = directory / "config.json"
    if not config.exists():
        raise UnreadableFile(
            f"{directory} has neither safetensors files nor a config.json", remedy=_GIVE
        )
    return read_model(config)


def _from_index(index: Path) -> ModelFiles:
    names = huggingface.read_index(_read(index))
    if not is_successful(names):
        raise _refused(index, names.failure())
    return _from_headers([index.parent / name for name in names.unwrap()], str(index))


def _from_headers(files: list[Path], read_from: str) -> ModelFiles:
    tensors = tuple(spec for file in files for spec in _read_header(file))
    if not tensors:
        raise _refused(read_from, HeaderMalformed(why="it names no tensor"))
    beside = files[0].parent / "config.json" if files else Path("config.json")
    if not beside.exists():
        return ModelFiles(read_from=read_from, tensors=tensors)
    config = _read_config(beside)
    if config.tie_word_embeddings:
        tensors = _with_tied_output(tensors)
    return ModelFiles(read_from=read_from, tensors=tensors, attention=attention_of(config))


def _with_tied_output(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Files leave out an output matrix that is tied to the embedding; engines need it."""
    if any(spec.name == "lm_head.weight" for spec in tensors):
        return tensors
    return tuple(
        msgspec.structs.replace(spec, aliases=("lm_head.weight",))
        if spec.name == "model.embed_tokens.weight"
        else spec
        for spec in tensors
    )


def _read_config(path: Path) -> HuggingFaceConfig:
    config = huggingface.read_config(_read(path))
    if not is_successful(config):
        raise _refused(path, config.failure())
    return config.unwrap()


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            data = file.read(huggingface.MOST_HEADER_BYTES + 1)
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror}", remedy=_GIVE) from error
    if len(data) > huggingface.MOST_HEADER_BYTES:
        raise UnreadableFile(
            f"{path}: more than {huggingface.MOST_HEADER_BYTES:,} bytes", remedy=_GIVE
        )
    return data


def _read_header(path: Path) -> tuple[TensorSpec, ...]:
    try:
        with open_regular(path) as file:
            length = huggingface.header_length(file.read(huggingface.LENGTH_BYTES))
            if not is_successful(length):
                raise _refused(path, length.failure())
            data = file.read(length.unwrap())
            if len(data) < length.unwrap():
                why = f"it should have {length.unwrap()} bytes, and the file ends after {len(data)}"
                raise _refused(path, HeaderMalformed(why=why))
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror}", remedy=_GIVE) from error
    specs = huggingface.read_header(data)
    if not is_successful(specs):
        raise _refused(path, specs.failure())
    return specs.unwrap()


def _refused(path: Path | str, error: ShapesError) -> PlanRefused:
    return PlanRefused(f"{path}: {describe(error)}", remedy=_GIVE, error=error)
