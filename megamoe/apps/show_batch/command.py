"""Show a batch of training: its tokens, which have a loss, documents and padding.

python tools/show_batch.py --config examples/demo.yaml
python tools/show_batch.py --config run.yaml --set valid --first 8 --count 2 data.sequence_length=512

In a terminal, what has a loss is green. Elsewhere, and with --colour never, it stands in [[ ]]. A token has a
loss if the model learns to predict it; where the labels differ from the next tokens, as of masked
language models, it is written token->label. Nothing is trained, and no model is built.
"""

import argparse
import sys
from pathlib import Path

from megamoe.apps.command import check_positive, parser_of, run_tool
from megamoe.errors import UserError

TRAIN = "train"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="the YAML of the run")
    add("--set", default=TRAIN, metavar="NAME", help="train, valid, test or a set of data.validation (train)")
    add("--first", type=int, default=0, metavar="N", help="the number of the first sample (default 0)")
    add("--count", type=int, metavar="N", help="samples to show (default train.micro_batch_size)")
    add("--colour", choices=("auto", "always", "never"), default="auto", help="default: in a terminal")
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_positive("--count", options.count)
    if options.first < 0:
        raise UserError(f"--first: found {options.first}, expected 0 or more")
    from megamoe.apps.show_batch.show import Words, pieces_of, text_of
    from megamoe.config import load_config
    from megamoe.parallel.layout import fewest_ranks
    from megamoe.train.resolved import resolve_run

    config = load_config(options.config, options.overrides)
    run = resolve_run(config, fewest_ranks(config.parallel))
    samples = config.evaluation.batches * run.schedule.final
    found = run.objective.datasets(run.schedule.total_samples(run.steps), samples)
    sets = {TRAIN: found.train, **found.validation, **({} if found.test is None else {"test": found.test})}
    if options.set not in sets:
        raise UserError(f"--set: found {options.set!r}, expected {', '.join(sets)}")
    dataset = sets[options.set]
    last = options.first + (options.count or config.train.micro_batch_size)
    if last > len(dataset):  # type: ignore[arg-type]
        raise UserError(
            f"--first {options.first}: the set has {len(dataset)} samples, expected fewer"  # type: ignore[arg-type]
        )
    numbers = list(range(options.first, last))
    batch = run.objective.make_batch([dataset[number] for number in numbers], numbers)
    words = Words(run.vocabulary.tokenizer, labels_are_tokens=config.model.num_labels is None)
    colours = options.colour == "always" or (options.colour == "auto" and sys.stdout.isatty())
    share = float((batch.loss_mask_BS > 0).float().mean())
    print(
        f"{options.set}, samples {numbers[0]} to {numbers[-1]}: {len(batch.tokens_BS)} sequences of "
        f"{batch.tokens_BS.shape[1]} places, a loss at {share:.0%} of them"
    )
    for row in range(len(batch.tokens_BS)):
        print(f"=== sequence {row + 1} ===")
        print(text_of(pieces_of(batch, row, words), colours).rstrip("\n"))
