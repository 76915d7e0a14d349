"""Looks at a study before its first run: can every row's configuration run, and is its data prepared?"""

import json

from megamoe.apps.lab.plan import Plan, configured
from megamoe.config.files import merge
from megamoe.config.load import apply_override
from megamoe.errors import UserError
from megamoe.train.resolved import examine
from megamoe.validation.run import section_problems


def rows_that_cannot_run(plan: Plan) -> list[str]:
    """Return a line for each row whose runs would end at their start, with the first reason.

    The check is that of `pretrain_gpt_moe.py --check`. A failed run does not end a study, so rows whose data
    or machine is the reason are only named: the others may run.

    Raises:
        UserError: for a configuration that can run nowhere, or if no row can run.
    """
    tuning = plan.size.tuning
    configs = {}
    for row, tree in {**plan.tuning_configs, **plan.configs}.items():
        tree = merge(tree, {"name": row})
        if tuning is not None:
            apply_override(tree, f"{tuning.key}={json.dumps(tuning.values[0])}")
        configs[row] = configured(plan, row, tree)
        for problem in section_problems(configs[row], plan.size.ranks, None):
            raise UserError(f"{plan.path}: row {row}: {problem}")
    found = {row: problems[0] for row, it in configs.items() if (problems := examine(it, plan.size.ranks)[0])}
    needs = f"; {plan.study.needs} prepares the data" if plan.study.needs else ""
    lines = [f"row {row} cannot run: {problem}{needs}" for row, problem in found.items()]
    if len(lines) == len(configs):
        raise UserError(f"{plan.path}: {lines[0]}")
    return lines
