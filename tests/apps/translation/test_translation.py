"""Translation: batches of pairs of similar lengths, shares of languages, sets, and refusals in one line."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.command import data_overrides
from megamoe.apps.prepare.verify import verify_in_full
from megamoe.apps.translation.dataset import PairDataset, PairOptions
from megamoe.config import RunConfig
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares
from megamoe.train.objective import build_objective, token_shares
from megamoe.train.resolved import resolve_run
from tests.support.data.pairs import make_pairs
from tests.support.data.sources import stream, take
from tests.support.refusals import Case, cases, told
from tests.support.tiny import restored_process, tiny


@pytest.fixture(name="pairs", scope="module")
def _pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("translation"), [0.6, 0.3, 0.1])


def config_of(pairs: Path, *overrides: str, **options: Any) -> RunConfig:
    objective = {"name": "translation", "bucket": 8, **options}
    return tiny(
        "data.mock=false",
        f"data.sources=[{pairs / 'train'}]",
        "data.split=[0.6, 0.3, 0.1]",
        "data.sequence_length=32",
        "model.vocab_size=null",
        "model.architecture=encoder_decoder",
        "moe.layers=none",
        f"train.objective={objective}",
        *overrides,
    )


def batches_of(config: RunConfig, count: int, ranks: int = 1, rank: int = 0, start: int = 0) -> list[Batch]:
    run = resolve_run(config, 1)
    dataset, micro = run.objective.datasets(10_000, 0).train, config.train.micro_batch_size
    return take(stream(dataset, micro, start, rank, ranks, make_batch=run.objective.batch), count)


def texts(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs of a batch, without padding."""
    assert batch.source_BL is not None and batch.source_lengths_B is not None and batch.lengths_B is not None
    sides = (
        [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]
        for tokens, lengths in ((batch.source_BL, batch.source_lengths_B), (batch.labels_BS, batch.lengths_B))
    )
    return list(zip(*sides, strict=True))


def test_an_epoch_holds_each_pair_once_in_batches_of_similar_lengths(pairs: Path) -> None:
    config = config_of(pairs, "train.micro_batch_size=4")
    run = resolve_run(config, 1)
    data = PairDataset(str(pairs / "train"), run.vocabulary, PairOptions())
    items = (data[number] for number in range(len(data)))
    expected = Counter((tuple(item["source"].tolist()), tuple(item["target"].tolist())) for item in items)
    epoch = run.objective.samples_per_epoch()
    assert epoch == len(data) // 8 * 8
    batches = batches_of(config, epoch // 4)
    seen = Counter(pair for batch in batches for pair in texts(batch))
    assert all(expected[pair] >= count for pair, count in seen.items())
    assert sum(seen.values()) == epoch
    sizes = [sum(len(a) + len(b) for a, b in texts(batch)) for batch in batches]
    filled = [
        batch.source_BL.numel() + batch.labels_BS.numel() for batch in batches if batch.source_BL is not None
    ]
    assert sum(sizes) > 0.75 * sum(filled)  # a random order fills about half
    tags = run.vocabulary.special.languages
    for source, target in seen:
        assert source[0] == tags[{"d": "de", "f": "fr", "i": "it"}[chr(target[0])]]
        assert source[-1] == target[-1] == run.vocabulary.eod
    first = batches[0]
    assert first.tokens_BS[:, 0].tolist() == [run.vocabulary.eod] * 4
    inner_BS = first.loss_mask_BS[:, 1:]
    assert torch.equal(first.tokens_BS[:, 1:] * inner_BS, first.labels_BS[:, :-1] * inner_BS)


def test_batches_are_the_same_on_more_ranks_with_other_micro_batches_and_after_a_resume(pairs: Path) -> None:
    alone = [
        pair
        for batch in batches_of(config_of(pairs, "train.micro_batch_size=4"), 12)
        for pair in texts(batch)
    ]
    small = config_of(pairs, "train.micro_batch_size=2")
    shared = [batches_of(small, 12, ranks=2, rank=rank) for rank in range(2)]
    together = [pair for turn in zip(*shared, strict=True) for batch in turn for pair in texts(batch)]
    assert together == alone
    resumed = [pair for batch in batches_of(small, 14, start=20) for pair in texts(batch)]
    assert resumed == alone[20:]


def test_small_languages_come_more_often_with_an_exponent(pairs: Path) -> None:
    """The order is that of the plan, which has tests of its own; here: the configured exponent arrives."""
    counts = {}
    for exponent in ("null", "0.0"):
        config = config_of(pairs, f"data.sampling_exponent={exponent}", "train.micro_batch_size=8")
        batches = batches_of(config, 40)
        counts[exponent] = Counter(target[0] for batch in batches for _, target in texts(batch))
    by_size, even = counts["null"], counts["0.0"]
    assert by_size[ord("d")] > 3.5 * by_size[ord("i")]
    assert even[ord("d")] < 1.3 * even[ord("i")]


def test_sets(pairs: Path) -> None:
    further = f"data.validation={{more: [{pairs / 'test'}]}}"
    config = config_of(pairs, further, languages=["de", "it"], direction="both", validate=["de-en", "en-it"])
    run = resolve_run(config, 1)
    found = run.objective.datasets(16, 24)
    assert list(found.validation) == ["valid", "de-en", "en-it", "more"]
    assert found.test is not None and [len(s) for s in (found.train, found.test)] == [16, 24]  # type: ignore[arg-type]
    tags = run.vocabulary.special.languages
    for name, wanted in (("de-en", {"en"}), ("en-it", {"it"}), ("valid", {"de", "it", "en"})):
        dataset: Any = found.validation[name]
        assert {int(dataset[n]["source"][0]) for n in range(24)} == {tags[language] for language in wanted}, (
            name
        )
    alone = resolve_run(config_of(pairs, "data.split=[1, 0, 0]"), 1).objective.datasets(16, 8)
    assert not alone.validation and alone.test is None
    assert not run.objective.datasets(16, 0).validation


def test_counted_tokens_and_shares(pairs: Path) -> None:
    config = config_of(pairs, direction="both")
    run = resolve_run(config, 1)
    data = PairDataset(str(pairs / "train"), run.vocabulary, PairOptions(direction="both"))
    source, target = float(data.source_lengths.mean()), float(data.target_lengths.mean())
    assert run.sample_tokens == round(source + target)
    found = token_shares(config)
    assert found.stacks == pytest.approx({"encoder": source / 32, "decoder": target / 32})
    assert found.predicted == pytest.approx(target / 32)
    assert TokenShares().counted == 1


@pytest.mark.parametrize("case", cases("translation", "run: "))
def test_refusals(pairs: Path, case: Case, expect_message: Callable[..., None]) -> None:
    overrides = [each.replace("FOLDER", str(pairs)) for each in case["overrides"]]

    def datasets() -> None:
        config = config_of(pairs, *overrides, **case.row.get("options", {}))
        resolve_run(config, 1).objective.datasets(8, 8)

    expect_message(case, told(datasets, pairs))


def test_directions_to_validate_do_not_hinder_other_data(pairs: Path) -> None:
    """They are of a saved run; these are the overrides of tools/evaluate.py."""
    overrides = data_overrides([f"other={pairs / 'test'}"])
    run = resolve_run(config_of(pairs, *overrides, validate=["en-de"]), 1)
    assert [*run.objective.datasets(8, 8).validation] == ["other"]


def test_pairs_where_text_is_read(pairs: Path) -> None:
    config = tiny("data.mock=false", f"data.sources=[{pairs / 'train'}]", "model.vocab_size=null")
    with pytest.raises(
        UserError, match="'.*train' holds pairs of texts, which train.objective causal does not"
    ):
        resolve_run(config, 1)
    with pytest.raises(UserError, match="is a dataset of pairs; name a side: .*train.source"):
        verify_in_full(str(pairs / "train"))
    one_side = tiny("data.mock=false", f"data.sources=[{pairs / 'train'}.target]", "model.vocab_size=null")
    assert build_objective(one_side, resolve_run(one_side, 1).vocabulary).datasets(4, 0)


def test_tokenizers_without_tags_and_padding(pairs: Path) -> None:
    """Without tags only `tag: none` works; without padding the end fills the sequences."""
    config = config_of(pairs, tag="none")
    run = resolve_run(config, 1)
    bare = type(run.vocabulary)(run.vocabulary.size, run.vocabulary.eod, None)
    with pytest.raises(UserError, match="the tokenizer reserves no <2de>; prepare the pairs"):
        build_objective(config_of(pairs), bare)
    plain = build_objective(config, bare)
    items = [{side: torch.arange(1, size) for side in ("source", "target")} for size in (3, 5)]
    assert plain.batch(items, [0, 1]).labels_BS[0].tolist() == [1, 2, bare.eod, bare.eod]


def test_a_damaged_side_is_refused(pairs: Path, tmp_path: Path) -> None:
    shutil.copytree(pairs.parent, tmp_path / "out")
    copy = tmp_path / "out/pairs"
    content = bytearray((copy / "train.target.bin").read_bytes())
    content[5] ^= 1
    (copy / "train.target.bin").write_bytes(content)
    with restored_process(), pytest.raises(UserError, match="train.target.bin' is damaged or another"):
        resolve_run(config_of(copy), 1).objective.datasets(8, 0)
