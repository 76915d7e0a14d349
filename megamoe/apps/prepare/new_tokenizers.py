"""Tokenizers that preparation makes: trained on the texts, or `bytes` with reserved tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megamoe.data.special import check_special, expand
from megamoe.data.tokenizers import END_OF_DOCUMENT, NUM_BYTES, ByteTokenizer, Tokenizer, load_tokenizer
from megamoe.errors import UserError


def load_with_special(reference: str, special: str) -> Tokenizer:
    """Load a tokenizer that must reserve the tokens of `special` (`special.expand`); `bytes` gets them.

    Raises:
        UserError: as `load_tokenizer`, and if another tokenizer than `bytes` lacks one of them.
    """
    if reference == ByteTokenizer.name and special:
        return ByteTokenizer(special)
    tokenizer = load_tokenizer(reference)
    check_special(expand(special), tokenizer.special, tokenizer.name)
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path, special: Sequence[str] = ()) -> None:
    """Train a byte-level BPE and save it as the tokenizer.json `path`; the same texts give the same file.

    It holds the end-of-document token (id 0), the tokens of `special` (from id 1 on), the 256 bytes, and
    merges until `vocab_size`; fewer where the texts have no further pair to merge.

    Raises:
        UserError: if `vocab_size` cannot hold the bytes, the end-of-document token and `special`.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    reserved = list(dict.fromkeys([END_OF_DOCUMENT, *special]))
    least = NUM_BYTES + len(reserved)
    if vocab_size < least:
        raise UserError(f"vocab_size {vocab_size}: a byte-level BPE needs at least {least}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(path))


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, path: Path, special: Sequence[str] = ()
) -> None:
    """Train a SentencePiece unigram model and save it as `path`, which ends in .model.

    Its ids: <unk>, </s>, the tokens of `special` (control symbols, to which no text is encoded), the 256
    bytes (for characters that it does not know), and pieces up to `vocab_size`; fewer where the texts have
    no more.

    Raises:
        UserError: if `vocab_size` cannot hold these and the characters of the texts.
    """
    from sentencepiece import SentencePieceTrainer

    with open(path, "wb") as file:
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=file,
                vocab_size=vocab_size,
                control_symbols=list(dict.fromkeys(special)),
                unk_id=0,
                eos_id=1,
                bos_id=-1,
                pad_id=-1,
                byte_fallback=True,
                hard_vocab_limit=False,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                max_sentence_length=1 << 20,
                num_threads=1,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"vocab_size {vocab_size}: SentencePiece cannot train such a vocabulary: {reason}"
            ) from error
