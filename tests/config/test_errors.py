"""Every mistake in a configuration is one line: key, value, what was expected, the nearest choice."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.config import RunConfig, load_config
from megamoe.errors import ConfigError, UserError
from tests.support.refusals import Case, cases, told

Load = Callable[..., RunConfig]


@pytest.mark.parametrize("case", cases("config"))
def test_wrong_values_keys_and_files(
    load: Load, tmp_path: Path, case: Case, expect_message: Callable[..., None]
) -> None:
    for name, content in case.row.get("files", {}).items():
        (tmp_path / name).write_text(content)
    message = told(lambda: load(case["text"], *case.row.get("overrides", ())), tmp_path)
    assert len(message) < 900
    expect_message(case, message)


def test_an_error_of_several_lines_can_go_to_another_process(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("seed: -1\nname: 3")
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^--config: cannot read '.*/none.yaml': No such file or directory$"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="^--config: cannot read '.*': Is a directory$"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary.yaml is not valid YAML: not UTF-8 text$"):
        load_config(tmp_path / "binary.yaml")
