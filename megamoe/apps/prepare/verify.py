"""Verifying a whole prepared dataset, without a run."""

from pathlib import Path

from megamoe.data.card import DataFiles, check_files, load_card
from megamoe.data.index_file import read_header
from megamoe.data.verify import ScanCache, verify_bin, verify_files
from megamoe.errors import UserError
from megamoe.object_storage import is_url

MOST_TOKEN_IDS = 2**63


def verify_in_full(prefix: str) -> str:
    """Verify a whole dataset without the cache; return a line that says what was verified.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    if is_url(prefix):
        raise UserError(
            f"data {prefix!r}: only data on a disk is read whole; a run checks each block that it fetches"
        )
    files, card = DataFiles(Path(prefix)), load_card(prefix)
    check_files(prefix, card)
    vocab_size = card.tokenizer.vocab_size if card else MOST_TOKEN_IDS
    verify_files(prefix, vocab_size, ScanCache(None), reads_bin=False)
    header, _ = read_header(files.idx)
    largest = verify_bin(files.bin, card, header.dtype, vocab_size, ScanCache(None), None)
    if card is not None and card.largest_token not in (None, largest):
        raise UserError(
            f"data card {str(files.card)!r} says that the largest token id is {card.largest_token}, it is "
            f"{largest}; prepare the data again"
        )
    by = "sizes, SHA-256" if card else "no card, so no SHA-256 to compare with; sizes"
    return f"{prefix}: {by}, index and token ids (up to {largest}) are right"
