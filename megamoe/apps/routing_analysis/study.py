"""The analyses of one or more checkpoints on one data set: which there are, and running them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megamoe.apps.evaluation.perplexity import validation_sets
from megamoe.apps.evaluation.trained_model import Session, TrainedModel
from megamoe.apps.routing_analysis.collect import LayerPass, RoutingPass, TokenSample, chosen_layers, collect
from megamoe.apps.routing_analysis.measures import (
    compare_loads,
    fluctuation,
    representation_collapse,
    required,
    token_map,
    token_specialisation,
    training_load,
)
from megamoe.apps.routing_analysis.positives import check_activation, positive_activations, unsigned
from megamoe.errors import UserError
from megamoe.objectives.objective import objective_class

ALONE = ("collapse", "required", "positive", "load", "tokens", "map")
FLUCTUATION = "fluctuation"  # compares checkpoints
ARCHITECTURES = ("decoder", "encoder")


@dataclass(frozen=True)
class Options:
    """What to analyse. analyses: empty: all that suit the checkpoints.

    validation: the name of the data set; None: the first. samples: sequences; None: as many as in training.
    tokens: size of the token sample. layers: numbers of MoE layers; empty: all. thresholds: of `required`.
    """

    analyses: tuple[str, ...] = ()
    validation: str | None = None
    samples: int | None = None
    tokens: int = 4096
    layers: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = (0.9,)


@dataclass
class Examined:
    """What was found about one checkpoint; `found` by analysis, plain data. layers: by number, without the
    hidden states."""

    path: Path
    run: str
    step: int
    seed: int
    precision: str
    lm_loss: float
    tokens: int
    layers: dict[int, LayerPass]
    found: dict[str, Any]

    @property
    def label(self) -> str:
        """Run and step, for tables and figures."""
        return f"{self.run}, step {self.step}"

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain = {key: value for key, value in vars(self).items() if key not in ("layers", "found")}
        return {**plain, "path": str(self.path), "analyses": self.found}


@dataclass
class StudyData:
    """The data set, which the first checkpoint's configuration names, for all checkpoints."""

    name: str
    dataset: Any
    samples: int
    sequence_length: int
    vocabulary_size: int
    fingerprint: str | None
    sample: TokenSample

    @classmethod
    def of(cls, trained: TrainedModel, options: Options) -> "StudyData":
        sets, samples = validation_sets(trained, options.samples)
        name = options.validation or next(iter(sets))
        if name not in sets:
            raise UserError(f"--set: no data set {name!r}; expected one of {', '.join(sets)}")
        length = trained.config.data.sequence_length
        sample = TokenSample.draw(samples * length, options.tokens)
        size = trained.vocabulary.size
        return cls(name, sets[name], samples, length, size, _fingerprint(trained), sample)

    def check(self, trained: TrainedModel, first: Path) -> None:
        """Refuse a checkpoint that cannot read this data."""
        length, size = trained.config.data.sequence_length, trained.vocabulary.size
        known = _fingerprint(trained)
        tokenizers_differ = known and self.fingerprint and known != self.fingerprint
        if size != self.vocabulary_size or tokenizers_differ:
            raise UserError(
                f"{trained.path}: vocabulary of {size} tokens, {first} has another one of "
                f"{self.vocabulary_size}; compare checkpoints with the same tokenizer"
            )
        if length != self.sequence_length:
            raise UserError(
                f"{trained.path}: data.sequence_length {length}, {first} has {self.sequence_length}; add the "
                "override data.sequence_length=..."
            )


def study(
    ranks: Session, paths: Sequence[Path], options: Options, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Analyse checkpoints one after the other, then compare them. Collective over all ranks.

    report: called with a line for each checkpoint that was opened. Returns plain data for JSON: data (name,
    samples, sampled tokens), checkpoints (`Examined.as_data`), comparisons (by analysis). It is complete on
    the first rank.

    Raises:
        UserError: for an unknown analysis or layer, checkpoints that do not fit each other or the analysis,
            and what `Session.open` and `perplexity_on` raise.
    """
    examined: list[Examined] = []
    data: StudyData | None = None
    for path in paths:
        trained = ranks.open(path, architectures=ARCHITECTURES)
        _check_unpadded(trained)
        report(f"{trained.path}, step {trained.step}, {trained.precision}")
        data = data or StudyData.of(trained, options)
        if examined:
            data.check(trained, examined[0].path)
            check_shape(trained, examined[0], options)
        examined.append(examine(trained, data, options))
        del trained
    assert data is not None
    return {
        "data": {"name": data.name, "samples": data.samples, "sampled_tokens": len(data.sample)},
        "thresholds": list(options.thresholds),
        "checkpoints": [each.as_data() for each in examined],
        "comparisons": compare(examined, options),
    }


def _check_unpadded(trained: TrainedModel) -> None:
    """Refuse models whose sequences end in padding, which no router sees: of labels, or of chats."""
    if trained.config.model.num_labels:
        raise UserError(
            f"{trained.path}: the model has a head for labels; expected a decoder or a masked language model"
        )
    if objective_class(trained.config).pads:
        raise UserError(
            f"{trained.path}: the sequences of train.objective {trained.config.train.objective.name} end in "
            "padding; analyse it on prepared text, with --data NAME=PREFIX and train.objective=causal"
        )


def check_names(options: Options, checkpoints: int) -> None:
    """Refuse unknown analyses, comparisons of one checkpoint, and numbers out of range.

    Raises:
        UserError: naming the option.
    """
    for name in options.analyses:
        if name not in (*ALONE, FLUCTUATION):
            raise UserError(f"--analyses: found {name!r}, expected {', '.join(ALONE)}, {FLUCTUATION}")
        if name == FLUCTUATION and checkpoints < 2:
            raise UserError(f"--analyses {name}: one checkpoint is given, and two or more are compared")
    if options.tokens < 1:
        raise UserError(f"--tokens: found {options.tokens}, expected at least 1")
    for threshold in options.thresholds:
        if not 0 <= threshold <= 1:
            raise UserError(f"--threshold: found {threshold:g}, expected 0 to 1")


def examine(trained: TrainedModel, data: StudyData, options: Options) -> Examined:
    """Run the analyses of one checkpoint. Collective over all ranks."""
    layers = chosen_layers(trained, options.layers)
    wanted = options.analyses or tuple(name for name in ALONE if name != "positive" or not unsigned(trained))
    if "positive" in wanted:
        check_activation(trained)
    inputs = trained, data.dataset, data.samples
    found = collect(*inputs, sample=data.sample, layers=layers, thresholds=options.thresholds)
    collective = {
        "load": lambda: compare_loads(found, training_load(*inputs, layers)),
        "positive": lambda: positive_activations(*inputs, layers),
    }
    results: dict[str, Any] = {name: run() for name, run in collective.items() if name in wanted}
    if trained.world.is_first:  # the others have the same tokens, and would only compute the same
        for name, of_layer in ((name, OF_PASS[name]) for name in wanted if name in OF_PASS):
            results[name] = {str(n): of_layer(trained, found, layer) for n, layer in found.layers.items()}
    for layer in found.layers.values():  # what comparisons do not need
        layer.hidden_SH, layer.projected_SD = layer.hidden_SH[:0], None
    run = trained.path.parent.parent if trained.path.parent.name == "checkpoints" else trained.path
    facts = (trained.path, run.name, trained.step, trained.config.seed, trained.precision)
    return Examined(*facts, found.lm_loss, found.tokens, found.layers, results)


def compare(examined: list[Examined], options: Options) -> dict[str, Any]:
    """Return the fluctuation of consecutive checkpoints of each run, if there are two.

    Where it is asked for by name, all given checkpoints are compared, in their order.
    """
    pairs = [(a, b) for a, b in pairwise(examined) if options.analyses or a.path.parent == b.path.parent]
    is_wanted = not options.analyses or FLUCTUATION in options.analyses
    rows = [
        {
            **{"earlier": a.label, "later": b.label, "earlier_step": a.step, "later_step": b.step},
            "layers": {
                str(number): fluctuation(layer, b.layers[number]) for number, layer in a.layers.items()
            },
        }
        for a, b in pairs
    ]
    return {FLUCTUATION: rows} if rows and is_wanted else {}


def check_shape(trained: TrainedModel, first: Examined, options: Options) -> None:
    """Refuse a model whose MoE layers are not those of the first one, in number and experts."""
    layers = chosen_layers(trained, options.layers)
    sizes = {number: layer.router.dims.num_experts for number, layer in layers.items()}
    wanted = {number: len(layer.load_E) for number, layer in first.layers.items()}
    if sizes != wanted:
        raise UserError(
            f"{trained.path}: experts by MoE layer are {sizes}, those of {first.path} {wanted}; compare "
            "models of one shape"
        )


def _fingerprint(trained: TrainedModel) -> str | None:
    tokenizer = trained.vocabulary.tokenizer
    return None if tokenizer is None else tokenizer.fingerprint


def _tokens(trained: TrainedModel, found: RoutingPass, layer: LayerPass) -> dict[str, Any]:
    tokenizer = trained.vocabulary.tokenizer
    return token_specialisation(found, layer, None if tokenizer is None else tokenizer.decode)


# (model, pass, layer) -> the analysis of one layer
OF_PASS: dict[str, Callable[[TrainedModel, RoutingPass, LayerPass], Any]] = {
    "collapse": lambda trained, found, layer: representation_collapse(
        layer.hidden_SH.numpy(), layer.first_S.numpy()
    ),
    "required": lambda trained, found, layer: required(layer, found.thresholds),
    "tokens": _tokens,
    "map": lambda trained, found, layer: token_map(layer),
}
