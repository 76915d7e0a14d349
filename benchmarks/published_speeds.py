"""Plans the layouts of published speeds of training, and prints planned beside published.

    python benchmarks/published_speeds.py [--json FILE]

The speeds, the layouts and their sources are in published_speeds.json. Nothing is measured here.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from megamoe.apps.plan import cuda_device

ROOT = Path(__file__).resolve().parents[1]
NODE = 8


def planned(row: dict[str, Any]) -> dict[str, Any]:
    """Return a published row with what the plan of the same layout says, or why there is none."""
    from megamoe.apps.plan.hardware import GPUS
    from megamoe.apps.plan.plan import Cluster, make_plan
    from megamoe.config import load_config
    from megamoe.errors import UserError

    config = load_config(ROOT / f"examples/recipes/{row['recipe']}.yaml", row["overrides"])
    try:
        plan = make_plan(config, Cluster(row["gpus"] // NODE, NODE, GPUS["h100"]))
    except UserError as error:
        return {**row, "refused": str(error)}
    tokens = plan.tokens_per_second / row["gpus"]
    return {
        **row,
        "planned": tokens,
        "ratio": tokens / row["tokens_per_gpu"],
        "utilisation": plan.utilisation,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
    }


def main() -> None:
    """Plan all rows and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    options = parser.parse_args()
    cuda_device.load()
    rows = json.loads((ROOT / "benchmarks/published_speeds.json").read_text())
    print("| model | H100 | layout | routing | published | planned | planned / published | MFU | peak GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    found = []
    for row in rows:
        each = planned(row)
        found.append(each)
        head = f"| {row['model']} | {row['gpus']:,} | {row['layout']} | {row['routing'].partition(':')[0]} "
        head += f"| {row['tokens_per_gpu']:,} |"
        if "refused" in each:
            print(f"{head} refused: {each['refused']} | | | |", flush=True)
            continue
        peak = f"{each['peak_bytes'] / 1e9:.1f}" + ("" if each["fits"] else ", does not fit")
        figures = f"{each['planned']:,.0f} | {each['ratio']:.2f} | {each['utilisation']:.1%} | {peak} |"
        print(f"{head} {figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
