"""Checks of batch sizes, the length of the run, and the schedule of the learning rate."""

from collections.abc import Iterator

from megamoe.config.schema import RunConfig
from megamoe.errors import Problem
from megamoe.optim.schedule import warmup_steps

MOST_SIZES = 100_000  # of the batch size's growth
GROWTH = ("start", "increment")


def batch_problems(config: RunConfig, data_parallel: int) -> Iterator[Problem]:
    """Yield batch sizes that the data-parallel ranks cannot share, and a growth that misses its end."""
    train = config.train
    unit = train.micro_batch_size * data_parallel
    sizes = [("train.global_batch_size", train.global_batch_size or unit)]
    if train.batch_rampup is not None:
        sizes += [(f"train.batch_rampup.{key}", getattr(train.batch_rampup, key)) for key in GROWTH]
    for key, size in sizes:
        if size % unit:
            nearest = max(unit, (size + unit // 2) // unit * unit)
            yield Problem(
                key,
                f"{size} is not a multiple of {unit} (train.micro_batch_size {train.micro_batch_size} x "
                f"{data_parallel} data-parallel ranks); nearest: {nearest}",
            )
    if train.batch_rampup is None:
        return
    growth = sizes[0][1] - train.batch_rampup.start
    if growth < 0 or growth % train.batch_rampup.increment:
        yield Problem(
            "train.batch_rampup",
            f"from {train.batch_rampup.start} by {train.batch_rampup.increment} does not reach "
            f"train.global_batch_size {sizes[0][1]}",
        )
    elif growth // train.batch_rampup.increment > MOST_SIZES:
        yield Problem(
            "train.batch_rampup.increment",
            f"{train.batch_rampup.increment} makes more than {MOST_SIZES:,} batch sizes; raise it",
        )


def schedule_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield lengths, warm-ups and rates that exclude each other."""
    optimizer = config.optimizer
    lengths = {key: getattr(config.train, key) for key in ("steps", "epochs", "tokens")}
    (first, length), *others = ((key, length) for key, length in lengths.items() if length is not None)
    for other, found in others:
        yield Problem(
            f"train.{first}",
            f"found {length} beside train.{other} {found}; leave one out (on the command line: "
            f"train.{first}=null)",
        )
    if config.train.epochs is not None and config.data.mock:
        yield Problem("train.epochs", "data.mock has no end, so no epochs; set train.steps instead")
    if optimizer.warmup_share is not None and optimizer.warmup_steps:
        yield Problem(
            "optimizer.warmup_share",
            f"found {optimizer.warmup_share:g} beside warmup_steps {optimizer.warmup_steps}; leave one out",
        )
    elif config.train.steps is not None and not others:  # else when the data is read
        yield from warmup_problems(config, config.train.steps)
    if config.train.loss_spike.action == "stop" and config.train.loss_spike.sigmas is None:
        yield Problem(
            "train.loss_spike.action",
            "found stop, but no sigmas say what a spike is; set train.loss_spike.sigmas, such as 6",
        )
    if optimizer.min_lr > optimizer.lr:
        yield Problem("optimizer.min_lr", f"{optimizer.min_lr} is more than optimizer.lr {optimizer.lr}")


def warmup_problems(config: RunConfig, steps: int) -> Iterator[Problem]:
    """Yield why the warm-up, or the decay of `wsd`, does not fit into the schedule of so many steps."""
    optimizer = config.optimizer
    end, warmup = optimizer.decay_steps or steps, warmup_steps(optimizer, steps)
    decay = optimizer.wsd_decay_steps
    of_schedule = f"more than the {end} steps of the schedule (optimizer.decay_steps, by default the run's)"
    if optimizer.schedule == "constant":
        return
    if optimizer.schedule == "wsd" and decay is not None and warmup <= end < warmup + decay:
        after = f" after a warm-up of {warmup}" if warmup else ""
        yield Problem(
            "optimizer.wsd_decay_steps",
            f"{decay}{after} is {of_schedule}; lower optimizer.wsd_decay_steps or the warm-up",
        )
    if warmup <= end:
        return
    if optimizer.warmup_share is None:
        way_out = f"set optimizer.warmup_steps={end} or less"
        yield Problem("optimizer.warmup_steps", f"{warmup} is {of_schedule}; {way_out}")
    else:
        found = f"{optimizer.warmup_share:g} of {steps} steps, {warmup}, is {of_schedule}"
        yield Problem("optimizer.warmup_share", f"{found}; set a smaller optimizer.warmup_share")
