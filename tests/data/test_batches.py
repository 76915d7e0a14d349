"""Micro batches: who gets which sample, exact resume, running out, worker processes that come and go."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe.data.batches import Batch, BatchStream, Item, collate
from megamoe.data.mock import MockDataset
from megamoe.errors import UserError
from tests.support.data.sources import stream as stream_of
from tests.support.data.sources import take

ROOT = Path(__file__).resolve().parents[2]


def dataset(num_samples: int = 100, eod: int | None = None) -> MockDataset:
    return MockDataset("train", num_samples, sequence_length=6, vocab_size=50, eod=eod, seed=3)


def stream(start: int = 0, rank: int = 0, ranks: int = 1, workers: int = 0, **options: int) -> BatchStream:
    return stream_of(dataset(**options), 2, start, rank, ranks, workers=workers)


def test_batch_holds_the_samples_in_order() -> None:
    batch = take(stream(start=5), 1)[0]
    assert batch.sample_index_B.tolist() == [5, 6]
    assert torch.equal(batch.tokens_BS, torch.stack([dataset()[5]["tokens"], dataset()[6]["tokens"]]))
    assert torch.equal(batch.labels_BS[1], dataset()[6]["labels"])
    assert batch.position_ids_BS.tolist() == [list(range(6))] * 2
    assert batch.document_start_BS is None
    assert (batch.tokens_BS.dtype, batch.labels_BS.dtype) == (torch.int64, torch.int64)
    assert (batch.loss_mask_BS.dtype, batch.sample_index_B.dtype) == (torch.float32, torch.int64)


def test_document_aware_batch_and_device() -> None:
    batch = next(stream(eod=0))
    assert batch.document_start_BS is not None
    assert (batch.document_start_BS.shape, batch.document_start_BS.dtype) == ((2, 6), torch.int32)
    moved = batch.to("meta")
    assert moved.tokens_BS.is_meta and moved.position_ids_BS.is_meta
    assert moved.document_start_BS is batch.document_start_BS  # its lengths are read by the host
    twice = batch.repeat(2).document_start_BS
    assert twice is not None and torch.equal(twice, batch.document_start_BS.repeat(2, 1))
    assert next(stream()).to("meta").document_start_BS is None


def test_ranks_share_the_stream_that_one_rank_sees() -> None:
    alone = [batch.sample_index_B.tolist() for batch in take(stream(start=4), 6)]
    assert alone == [[4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    ranks = [take(stream(4, rank, 2), 3) for rank in range(2)]
    together = [ranks[rank][place].sample_index_B.tolist() for place in range(3) for rank in range(2)]
    assert together == alone


def test_resume_at_the_exact_sample_and_workers_change_nothing() -> None:
    whole = take(stream(), 8)
    for workers in (0, 1, 2):
        for part in (take(stream(workers=workers), 8), take(stream(workers=workers, start=6), 5)):
            for batch, expected in zip(part, whole[-len(part) :], strict=True):
                assert torch.equal(batch.tokens_BS, expected.tokens_BS)
                assert torch.equal(batch.sample_index_B, expected.sample_index_B)


@pytest.mark.parametrize("workers", [0, 1])
def test_running_out_names_the_samples_asked_and_hits_every_rank_alike(workers: int) -> None:
    # 11 samples: two rounds of 2 x 2 fit, of the third only rank 0 could have its batch.
    for rank in range(2):
        batches = stream(0, rank, 2, workers, num_samples=11)
        next(batches), next(batches)
        with pytest.raises(UserError, match="12 samples were asked of a dataset of 11"):
            next(batches)
        batches.close()
    assert len(take(stream(0, 1, 2, workers, num_samples=12), 3)) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_of_the_run_are_left_alone(workers: int) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    take(stream(workers=workers), 2)
    assert torch.equal(torch.rand(1), expected)


def test_close_ends_the_workers() -> None:
    before = set(multiprocessing.active_children())
    batches = stream(workers=2)
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()
    batches.close()
    assert set(multiprocessing.active_children()) == before
    with pytest.raises(StopIteration):
        next(batches)


def test_a_signal_to_the_whole_job_does_not_stop_the_loader() -> None:
    before = set(multiprocessing.active_children())
    with stream(workers=1) as batches:
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - before
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
        for _ in range(40):
            next(batches)


def test_exit_without_close_does_not_hang() -> None:
    script = (
        "import tempfile; folder = tempfile.TemporaryDirectory()\n"
        "from megamoe.data.batches import BatchStream\n"
        "from megamoe.data.mock import MockDataset\n"
        "data = MockDataset('train', 100, sequence_length=6, vocab_size=50, eod=None, seed=3)\n"
        "place = dict(start_sample=0, micro_batch_size=1, data_rank=0, data_size=1)\n"
        "batches = BatchStream(data, workers=2, **place)\n"
        "next(batches); print('read')\n"
    )
    command = [sys.executable, "-c", script]  # on a busy machine the imports alone take half a minute
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_what_a_user_did_wrong_is_a_message_of_the_loader() -> None:
    """A loader process would turn an exception into the text of its traceback."""

    def wrong(items: list[Item], indices: list[int]) -> Batch:
        raise UserError(f"no batch of {indices}")

    assert collate(wrong, [(3, {}), (4, {})]) == "no batch of [3, 4]"
    assert collate(wrong, [(3, {}), (4, "no sample 4")]) == "no sample 4"
