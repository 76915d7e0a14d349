"""Where a generation ends beside the end of a document: special tokens, and those of an imported model."""

from dataclasses import replace

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.sampling import Sampling
from megamoe.checkpoint.format.files import read_json
from megamoe.checkpoint.format.folder import kept_folder
from megamoe.errors import UserError, printable
from megamoe.io import reason
from megamoe.parallel.consensus import gather_from_ranks

SOURCES = ("generation_config.json", "config.json")  # the first that is there counts, as in transformers
IDS = "eos_token_id"


def with_all_ends(trained: TrainedModel, sampling: Sampling) -> Sampling:
    """Return the options with every token that ends a text. Collective: the ids are those of the first rank.

    A stop text that is a special token becomes a stop token, for decoded text has no special tokens. The ids
    of a folder that the model was imported from are added.

    Raises:
        UserError: if the file with these ids cannot be read.
    """
    tokenizer = trained.vocabulary.tokenizer
    marks = {} if tokenizer is None else tokenizer.marks
    texts = tuple(text for text in sampling.stop if text.strip() not in marks)
    tokens = [marks[text.strip()] for text in sampling.stop if text.strip() in marks]
    imported = gather_from_ranks(_imported(trained))[0]
    found = dict.fromkeys((*sampling.stop_tokens, *tokens, *imported))
    return replace(sampling, stop=texts, stop_tokens=tuple(found))


def _imported(trained: TrainedModel) -> list[int]:
    """Return the ids at which the model ends according to the folder that it was imported from, if it was."""
    folder = kept_folder(trained.path, trained.meta["config"])
    paths = [] if folder is None else [folder / name for name in SOURCES if (folder / name).is_file()]
    if not paths:
        return []
    try:
        found = read_json(paths[0]).get(IDS)
    except (OSError, ValueError) as error:
        raise UserError(f"{paths[0]}: {reason(error)}; expected the JSON file of the import") from None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(number) is int for number in ids):
        raise UserError(
            f"{paths[0]}: {IDS}: found {printable(str(found), 60)}, expected ids of tokens; correct it, or "
            "remove the key"
        )
    return ids
