"""Looks at a study before its first run: is the data prepared, and can every row's configuration run?"""

import glob
import json
from collections.abc import Iterator
from pathlib import Path

from megamoe.apps.lab.plan import Plan, configured
from megamoe.config.files import merge
from megamoe.config.load import apply_override
from megamoe.errors import UserError, printable
from megamoe.object_storage import is_url
from megamoe.train.resolved import examine
from megamoe.validation.run import section_problems


def check_data(plan: Plan) -> None:
    """Refuse a study whose prepared data is missing.

    Raises:
        UserError: with the row and the path of the first that is missing.
    """
    for row, config in {**plan.tuning_configs, **plan.configs}.items():
        data = config.get("data")
        if not isinstance(data, dict) or data.get("mock"):
            continue
        sources = data.get("sources")
        for source in sources if isinstance(sources, list) else [sources]:
            prefix = source.get("path") if isinstance(source, dict) else source
            # What is no path is refused with the row's configuration.
            if isinstance(prefix, str) and not _is_prepared(prefix):
                needs = f"; {plan.study.needs} prepares it" if plan.study.needs else ""
                raise UserError(
                    f"{plan.path}: row {row}: data.sources: {printable(prefix)} does not exist{needs}"
                )


def _is_prepared(prefix: str) -> bool:
    """Whether files have this prefix; of a pattern or a URL that is not looked up."""
    try:
        files = Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}*")
        return "*" in prefix or is_url(prefix) or any(files)
    except (OSError, ValueError):  # such as a name that is too long
        return False


def rows_that_cannot_run(plan: Plan) -> Iterator[str]:
    """Yield a line for each row whose runs would end at their start, with the first reason.

    The check is that of `pretrain_gpt_moe.py --check`. A failed run does not end a study, so rows whose data
    or machine is the reason are only named: the others may run.

    Raises:
        UserError: for a configuration that can run nowhere.
    """
    tuning = plan.size.tuning
    configs = {}
    for row, tree in plan.configs.items():
        tree = merge(tree, {"name": row})
        if tuning is not None:
            apply_override(tree, f"{tuning.key}={json.dumps(tuning.values[0])}")
        configs[row] = configured(plan, row, tree)
        for problem in section_problems(configs[row], plan.size.ranks, None):
            raise UserError(f"{plan.path}: row {row}: {problem}")
    for row, config in configs.items():
        problems, _ = examine(config, plan.size.ranks)
        if problems:
            yield f"row {row} cannot run: {problems[0]}"
