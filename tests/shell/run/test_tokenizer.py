"""A model without a tokenizer is refused by the setting that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config

from rollsync.shell.config import ConfigError
from rollsync.shell.run.tokenizer import PolicyTokenizer


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        PolicyTokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path"):
        PolicyTokenizer(str(tmp_path / "missing"))


def test_one_that_transformers_makes_of_no_files_is_no_tokenizer(tmp_path: Path) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: there is no tokenizer in .*vocabulary"):
        PolicyTokenizer(str(tmp_path))
