"""What model a run starts from, whatever directory it lies in.

Rule kept here: a copy of a model's files is the same model, and any other content is another one.
"""

from __future__ import annotations

from hashlib import file_digest, sha256
from pathlib import Path

from msgspec.structs import replace

from rollsync.pure.config import MasterConfig
from rollsync.shell.config import ConfigError
from rollsync.shell.files import open_regular


def model_digest(directory: Path) -> str:
    """SHA-256, hexadecimal, over the name and the SHA-256 of every file in `directory`, in the
    order of the names. Hidden files and what lies in subdirectories are not of the model.

    Raises:
        OSError: a file cannot be read.
    """
    whole = sha256()
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        with open_regular(path) as file:
            content = file_digest(file, "sha256").hexdigest()
        whole.update(f"{content}  {path.name}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def with_model_digest(config: MasterConfig) -> MasterConfig:
    """`config` with the digest of the model that it names.

    Raises:
        ConfigError: it names a digest itself, and the model has another one.
    """
    path = config.model.path
    try:
        found = model_digest(Path(path))
    except OSError as error:
        raise ConfigError(
            f"model.path: {error.filename}: {error.strerror}",
            remedy="name a directory whose files can be read",
            paths=("model.path",),
        ) from error
    wanted = config.model.digest
    if wanted is not None and wanted != found:
        raise ConfigError(
            f"model.digest is {wanted}, the files in {path} have {found}",
            remedy="give the path of that model, or leave model.digest out",
            paths=("model.digest",),
        )
    return replace(config, model=replace(config.model, digest=found))
