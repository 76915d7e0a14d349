"""From raw parquet to a dataset: language, quality, near-duplicates, decontamination, tokens; with datatrove.

python examples/data/pipeline.py raw/ data/clean --tokenizer tokenizer.json --work work/clean --workers 2
python examples/data/pipeline.py ... --executor slurm --partition cpu   # array jobs, one after another
python examples/data/pipeline.py ... --executor ray --address auto      # on a Ray cluster

Needs `pip install 'megamoe[datatrove]'`. RAW is a folder of parquet files, local or a URL. Every executor and
every number of workers gives the same bytes; --tasks divides the input and must stay. A stage that was killed
goes on when the command is given again: tasks that are complete are skipped. On Slurm and Ray, --work and the
output lie on a file system that all nodes share.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)
from datatrove.pipeline.filters import (
    GopherQualityFilter,
    GopherRepetitionFilter,
    LambdaFilter,
    LanguageFilter,
)
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig, create_hash_func
from datatrove.utils.text import ngrams, simplify_text
from datatrove.utils.word_tokenizers import load_word_tokenizer
from token_steps import MergeTokens, WriteTokens

STOP_WORDS = {
    *("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was"),
    *("with", "be", "by", "on", "not", "he", "his", "but", "at", "are", "this"),
}
LEAST_STOP_WORDS = 0.15  # of the words of an English text
LANGUAGE = "eng"
HERE = Path(__file__).resolve().parent  # where jobs find token_steps.py


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("raw", help="a folder of parquet files")
    add("output", help="prefix of the dataset")
    add(
        "--tokenizer",
        required=True,
        help="a tokenizer.json, or what else --tokenizer of prepare_data.py takes",
    )
    add("--work", required=True, help="a folder for what lies between the stages, and for logs")
    add("--tasks", type=int, default=8, help="parts of the input, and of the dataset")
    add("--workers", type=int, default=2, help="tasks at a time")
    add("--text-key", default="text")
    add(
        "--held-out",
        help="a folder of .jsonl with texts of evaluations; documents that hold 13 of their words go",
    )
    add(
        "--language",
        choices=("fasttext", "stopwords"),
        default="fasttext",
        help="of English: by the model lid.176, a download of 126 MB; or by the share of common words",
    )
    add("--least-words", type=int, default=50, help="of a document")
    add("--executor", choices=("local", "slurm", "ray"), default="local")
    add("--partition", help="of Slurm")
    add("--time", default="02:00:00", help="limit of a task on Slurm")
    add("--env", help="a command that a Slurm job runs first, such as: source .venv/bin/activate")
    add("--address", help="of the Ray cluster")
    return parser.parse_args()


def is_english(document: Any) -> bool:
    """Return whether at least LEAST_STOP_WORDS of a document's words are common in English."""
    words = document.text.lower().split()
    return sum(word in STOP_WORDS for word in words) >= LEAST_STOP_WORDS * max(1, len(words))


class IndexHeldOut(PipelineStep):
    """Writes the hashes of all n-grams of held-out texts, for NGramsDecontFilter.

    As NGramsDecontIndexer, which needs lighteval even if no task of it is named.
    """

    type = "megamoe"
    name = "index held-out texts"

    def __init__(self, folder: str, config: NGramsDecontConfig) -> None:
        super().__init__()
        self.path, self.config = Path(folder) / "held_out.index.hashes", config

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterable[Any]:
        words, hashed = load_word_tokenizer(LANGUAGE), create_hash_func(self.config.hash_config)
        hashes: set[int] = set()
        for document in data:
            text = words.word_tokenize(simplify_text(document.text, self.config.norm_config))
            hashes.update(hashed(" ".join(gram)) for gram in ngrams(text, self.config.n_grams))
        self.stat_update("hashes", value=len(hashes))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        np.array(sorted(hashes), dtype=self.config.hash_config.np_descr).tofile(self.path)
        yield from ()


def executor_of(options: argparse.Namespace) -> Callable[..., Any]:
    """Return what makes an executor of a stage's name, steps, number of tasks, and the stage before."""
    logs = f"{options.work}/logs"
    if options.executor == "local":
        return lambda name, steps, tasks, depends: LocalPipelineExecutor(
            steps, tasks=tasks, workers=options.workers, logging_dir=f"{logs}/{name}", depends=depends
        )
    if options.executor == "slurm":
        return lambda name, steps, tasks, depends: SlurmPipelineExecutor(
            steps,
            tasks=tasks,
            workers=options.workers,
            time=options.time,
            partition=options.partition,
            env_command="; ".join([f"export PYTHONPATH={HERE}:$PYTHONPATH", *filter(None, [options.env])]),
            job_name=name,
            logging_dir=f"{logs}/{name}",
            depends=depends,
            mail_type="NONE",
            sbatch_args={},
        )
    import ray
    from datatrove.executor.ray import RayPipelineExecutor

    ray.init(address=options.address)
    return lambda name, steps, tasks, depends: RayPipelineExecutor(
        steps,
        tasks=tasks,
        workers=options.workers,
        mem_per_cpu_gb=1,
        logging_dir=f"{logs}/{name}",
        depends=depends,
    )


def stages(options: argparse.Namespace) -> list[tuple[str, list[Any], int]]:
    """Return each stage's name, steps and number of tasks."""
    work, tasks = options.work, options.tasks
    hashes = HashConfig(hash_fc="sha1")  # the default, xxhash, fails with xxhash 4, which does not take text
    minhash = MinhashConfig(hash_config=hashes)
    grams = NGramsDecontConfig(find_query_ngrams=True, hash_config=hashes)
    jsonl = partial(JsonlReader, f"{work}/filtered", compression="gzip")
    english = LanguageFilter("en") if options.language == "fasttext" else LambdaFilter(is_english)
    found: list[tuple[str, list[Any], int]] = [
        (
            "filter",
            [
                ParquetReader(options.raw, text_key=options.text_key, glob_pattern="*.parquet"),
                english,
                GopherRepetitionFilter(language=LANGUAGE),
                GopherQualityFilter(min_doc_words=options.least_words, language=LANGUAGE),
                JsonlWriter(f"{work}/filtered", output_filename="${rank}.jsonl.gz", compression="gzip"),
            ],
            tasks,
        ),
        ("signatures", [jsonl(), MinhashDedupSignature(f"{work}/signatures", minhash, LANGUAGE)], tasks),
        (
            "buckets",
            [MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=minhash)],
            minhash.num_buckets,
        ),
        ("clusters", [MinhashDedupCluster(f"{work}/buckets", f"{work}/removed", config=minhash)], 1),
    ]
    last: list[Any] = [jsonl(), MinhashDedupFilter(f"{work}/removed")]
    if options.held_out:
        found.append(
            ("held_out", [JsonlReader(options.held_out), IndexHeldOut(f"{work}/held_out", grams)], 1)
        )
        last.append(NGramsDecontFilter(f"{work}/held_out", grams, language=LANGUAGE))
    found.append(("tokens", [*last, WriteTokens(options.output, options.tokenizer)], tasks))
    counted = [(f"{work}/logs/{name}", tasks) for name in ("filter", "tokens")]
    merge = MergeTokens(options.output, options.tokenizer, tasks, counted)
    return [*found, ("merge", [merge], 1)]


def main() -> None:
    options = arguments()
    executor = executor_of(options)
    last: Any = None
    for name, steps, tasks in stages(options):
        last = executor(name, steps, tasks, last)
    last.run()


if __name__ == "__main__":
    main()
