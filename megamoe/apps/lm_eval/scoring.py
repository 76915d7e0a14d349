"""The log-likelihood of tokens after a context, in batches of different lengths over all ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.data.batches import Batch, filled, positions
from megamoe.errors import UserError
from megamoe.parallel.process_groups import replica_group
from megamoe.train.micro_batch import micro_batch_of


class Question(NamedTuple):
    """Token ids whose log-likelihood is wanted, after others; the context has one token at least."""

    context: list[int]
    continuation: list[int]


class Answer(NamedTuple):
    """log_likelihood: the continuation's, in nats. is_greedy: each of its tokens is the likeliest one."""

    log_likelihood: float
    is_greedy: bool


@torch.no_grad()
def answers(
    trained: TrainedModel, questions: Sequence[Question], batch_size: int, longest: int
) -> list[Answer]:
    """Return the answer to each question. Collective: every rank asks the same and gets all answers.

    The data-parallel ranks take the batches in turn. A batch holds questions of similar lengths. Padding
    follows them, and the MoE layers do not route it. longest: the input tokens of a question; what exceeds
    them is cut from the left of its context. An empty continuation has the log-likelihood 0.

    The probabilities are over all rows of the output layer, as in training.

    Raises:
        UserError: if a continuation alone is longer than `longest`.
    """
    for question in questions:
        if len(question.continuation) > longest:
            raise UserError(
                f"a continuation has {len(question.continuation)} tokens, but the model reads {longest} at "
                "once; raise --max-length, or choose a task of shorter texts"
            )
    layout, device = trained.layout, trained.world.device
    asked = [number for number, question in enumerate(questions) if question.continuation]
    order = sorted(asked, key=lambda number: -sum(map(len, questions[number])))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    found_N2 = torch.zeros(len(questions), 2, dtype=torch.float64, device=device)
    first = layout.data_rank(trained.world.rank)
    for start in range(0, len(batches), layout.data):
        place = start + first
        # The experts of other ranks take part in every batch: a rank that has none left repeats the last one.
        numbers = batches[min(place, len(batches) - 1)]
        batch_N2 = _answers_of_batch(trained, questions, numbers, longest)
        if place < len(batches):
            found_N2[numbers] = batch_N2
    dist.all_reduce(found_N2, group=replica_group())
    return [
        Answer(value, greedy == 1.0 or not question.continuation)
        for question, (value, greedy) in zip(questions, found_N2.tolist(), strict=True)
    ]


def _answers_of_batch(
    trained: TrainedModel, questions: Sequence[Question], numbers: list[int], longest: int
) -> Tensor:
    """Return log-likelihoods and whether they are greedy, float64 [len(numbers), 2]."""
    asked = [questions[number] for number in numbers]
    whole = [[*question.context, *question.continuation][-(longest + 1) :] for question in asked]
    batch = _batch(trained, [tokens[:-1] for tokens in whole], numbers)
    trained.context.batch = micro_batch_of(batch, 0)
    logits_BSV = trained.decoder.whole_logits(batch.tokens_BS, batch.position_ids_BS)
    size, found = trained.vocabulary.size, []
    for logits_SV, question, tokens in zip(logits_BSV, asked, whole, strict=True):
        count = len(question.continuation)
        logits_CV = logits_SV[len(tokens) - 1 - count : len(tokens) - 1].double()
        words_C = torch.tensor(question.continuation, dtype=torch.int64, device=logits_CV.device)
        each_C = logits_CV.log_softmax(-1).gather(1, words_C[:, None])
        is_greedy = (logits_CV[:, :size].argmax(1) == words_C).all()
        found.append(torch.stack([each_C.sum(), is_greedy.double()]))
    return torch.stack(found)


def _batch(trained: TrainedModel, rows: list[list[int]], numbers: list[int]) -> Batch:
    """Return rows of tokens as a batch that ends in padding.

    numbers: keys of the rows' random draws, which thus do not depend on the batches.
    """
    # Tensor-parallel ranks share a pass's positions evenly.
    tokens_BS, lengths_B = filled([torch.tensor(row) for row in rows], 0, trained.layout.tensor)
    batch = Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS,
        position_ids_BS=positions(lengths_B, tokens_BS.shape[1]),
        loss_mask_BS=torch.ones(tokens_BS.shape),
        document_start_BS=None,
        sample_index_B=torch.tensor(numbers),
        lengths_B=lengths_B,
    )
    return batch.to(trained.world.device)
