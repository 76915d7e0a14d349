"""The examples have the values that papers and reports publish, or name the key in `differences`."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe.config import load_config
from megamoe.config.files import read_run
from megamoe.config.layer_kinds import ranges
from megamoe.config.load import to_dict
from megamoe.config.shapes import head_size
from megamoe.errors import UserError
from megamoe.moe.validation import check_parts
from megamoe.optim.parameter_groups import weight_decay

EXAMPLES = Path(__file__).parents[1] / "examples"
PUBLISHED: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("published_values.yaml").read_text()
)
FILES = {
    str(path.relative_to(EXAMPLES).with_suffix("")): path
    for folder in ("papers", "recipes", "tasks", "studies")
    for path in sorted((EXAMPLES / folder).glob("*.yaml"))
    if not path.stem.endswith("_small")
}
UNREAD = ["data.sources=[unread]", "data.validation={}"]  # no data is needed
Tree = dict[str, Any]


@functools.cache
def resolved(name: str, *overrides: str) -> Tree:
    if name.startswith(("tasks", "studies")):
        return read_run(FILES[name])
    config = load_config(FILES[name], [*(UNREAD if name.startswith("papers") else []), *overrides])
    tree = to_dict(config)
    tree["optimizer"]["weight_decay"] = weight_decay(config.optimizer)
    tree["model"]["head_size"] = head_size(config.model)
    return tree


def named_keys(tree: Tree) -> set[str]:
    """The keys that stand before the colons of `differences`."""
    texts = [text.partition(": ") for text in tree.get("differences", [])]
    return {key for before, colon, _ in texts if colon for key in before.split(", ")}


def value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key; None if it has none. Many numbers of blocks are a text."""
    for part in key.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else (tree or {}).get(part)
    return ranges(tree) if isinstance(tree, list) and len(tree) > 9 else tree


def expected_of(paper: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (file, place in the paper, key, published value)."""
    for group in PUBLISHED[paper]:
        pattern = group["files"] if "/" in group["files"] else f"papers/{group['files']}"
        names = [name for name in FILES if re.fullmatch(pattern, name)]
        assert names, pattern
        for name in names:
            for place in group.keys() - {"files"}:
                for key, value in group[place].items():
                    yield name, place, key, value


def undeclared(name: str, tree: Tree, place: str, key: str, value: Any) -> str | None:
    """Say that the value is another one than the published, unless the file declares it."""
    found = value_at(tree, key)
    same = found == value or key in named_keys(tree)
    return None if same else f"{name}: {key} is {found!r}, published as {value!r} ({place})"


@pytest.mark.parametrize("paper", PUBLISHED)
def test_examples_have_the_published_values(paper: str) -> None:
    rows = [*expected_of(paper)]
    assert [line for name, *row in rows if (line := undeclared(name, resolved(name), *row))] == []


def test_every_model_is_compared_and_declares_what_differs() -> None:
    compared = {name for paper in PUBLISHED for name, *_ in expected_of(paper)}
    models = {name for name in FILES if name.startswith(("papers", "recipes"))}
    assert models - compared == {"recipes/xmoe_323m", "recipes/xmoe_556m"}  # of examples/papers
    for name in models:
        tree = resolved(name)
        assert tree["differences"], name
        assert {key.split(".")[0] for key in named_keys(tree)} <= tree.keys(), name


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("papers/x_moe_top2", "moe.router.selector.weights=raw"),
        ("papers/x_moe_switch_top2", "moe.router.selector.weights=raw"),
        ("papers/moec_wmt14_x_moe", "moe.router={preset: x_moe_hypersphere}"),
        ("papers/moec_glue_x_moe", "moe.losses={cosine_balance: 0.01}"),
        ("papers/xmoe_wmt23_switch", "moe.layers.decoder={every: 2}"),
        ("recipes/qwen3_30b_a3b", "model.rope_base=1.0e6"),
        ("recipes/qwen3_30b_a3b", "moe.losses.switch_balance.sum_of_f=1"),
        ("recipes/olmoe_1b_7b", "moe.losses.switch_balance.over_layers=sum"),
        ("recipes/olmoe_1b_7b", "model.init_depth_scaling=outputs"),
        ("recipes/deepseek_v3", "model.init_depth_scaling=outputs"),
        ("recipes/kimi_k2", "optimizer.wsd_decay=linear"),
        ("recipes/glm_4_5_air", "model.rope_base=1.0e6"),
        ("papers/sgmoe_lm_32", "moe.output_activation=null"),
    ],
)
def test_a_wrong_value_is_seen(name: str, override: str) -> None:
    rows = [row for paper in PUBLISHED for each, *row in expected_of(paper) if each == name]
    planted = resolved(name, override)
    assert [line for row in rows if (line := undeclared(name, planted, *row))]


def test_a_baseline_that_is_tuned_with_frozen_routing_is_seen() -> None:
    for name, *row in expected_of("X-MoE, fine-tuning"):
        if name.startswith("studies"):
            rows = {row: {**of, "finetune": {}} for row, of in resolved(name)["rows"].items()}
            assert undeclared(name, {"rows": rows}, *row)


def test_commands_in_the_comments_are_accepted() -> None:
    """The commands of X-MoE's table 3 among them; a part that is missing is refused."""
    commands = [
        (EXAMPLES.parent / config, overrides.split())
        for path in (EXAMPLES / "papers").glob("*.yaml")
        for config, overrides in re.findall(
            r"^#   python pretrain_gpt_moe\.py --config (\S+)(.*)$", path.read_text(), re.M
        )
    ]
    assert len(commands) == 2
    for path, overrides in commands:
        check_parts(load_config(path, [*UNREAD, *overrides]).moe, 1)
    for path, _ in commands:
        for part in ("reduction", "normalise"):
            with pytest.raises(UserError):
                check_parts(load_config(path, [*UNREAD, f"moe.router.scorer.{part}=false"]).moe, 1)
