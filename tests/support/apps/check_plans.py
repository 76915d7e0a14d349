"""Plans of the example runs in a process that has the fake CUDA device; prints what became of each."""

from megamoe.apps.plan import cuda_device

if __name__ == "__main__":
    cuda_device.load()

import json
import sys
from pathlib import Path

from megamoe.apps.plan.hardware import GPUS
from megamoe.apps.plan.plan import Cluster, make_plan
from megamoe.config import load_config
from megamoe.errors import UserError

UNREAD = ["data.sources=[unread]", "data.validation={}"]
WORDS = 32768  # of a model whose data give the vocabulary
NODE = 8


def plan_of_example(path: Path) -> str:
    """Plan it on as many GPUs as share its experts; return why it cannot be, or nothing."""
    config = load_config(path, [] if "recipes" in path.parts else UNREAD)
    config.model.vocab_size = config.model.vocab_size or WORDS
    ranks = config.parallel.pipeline * max(config.parallel.expert, config.parallel.tensor)
    here = min(ranks, NODE)
    try:
        plan = make_plan(config, Cluster(ranks // here, here, GPUS["h200"]))
    except UserError as error:
        return str(error)
    good = plan.step_seconds > 0 and plan.size.total > 0 and 0 < plan.utilisation < 1
    return (
        "" if good and plan.peak_bytes > plan.figures.states["parameters"] > 0 else f"wrong figures: {plan}"
    )


if __name__ == "__main__":
    verdicts = {}
    for name in sys.argv[1:]:
        verdicts[name] = plan_of_example(Path(name))
        print(name, verdicts[name] or "planned", file=sys.stderr)
    print(json.dumps(verdicts))
