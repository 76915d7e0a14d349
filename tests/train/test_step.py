"""One step on one rank: the record's arithmetic, the masked mean, the update, evaluation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config import RunConfig
from megamoe.data.batches import Batch
from megamoe.model.architectures.decoder import GPT
from megamoe.moe.observation import Observation
from megamoe.moe.part import StepContext
from megamoe.optim.optimizers import adamw_options, parameter_groups
from megamoe.parallel.zero.engine import Engine
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.step import evaluate, model_inputs, train_step
from megamoe.train.step_record import LayerRecord, StepRecord
from megamoe.train.step_sums import LossSums, StepSums
from tests.support.tiny import VOCABULARY, tiny, tiny_engine, tiny_gpt

WEIGHTS = {"switch_balance": 0.5, "z_loss": 0.25}
LOSSES = f"moe.losses={WEIGHTS}"


def batch_of(mask: list[list[int]], seed: int) -> Batch:
    """A micro batch of random tokens that counts only where `mask` is 1."""
    mask_BS = torch.tensor(mask, dtype=torch.float32)
    text = torch.randint(0, VOCABULARY, mask_BS.shape, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(mask_BS.shape[1]).expand_as(text)
    return Batch(text, text.roll(-1, 1), positions, mask_BS, None, torch.arange(len(mask)) + 2 * seed)


# Two sequences of eight tokens each: 3 tokens count in the first micro batch, 12 in the second.
BATCHES = [
    batch_of([[1, 0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0]], seed=1),
    batch_of([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]], seed=2),
]


def engine_of(config: RunConfig, seed: int = 0, step: int = 0) -> tuple[Engine, StepContext]:
    context = StepContext(seed=seed, step=step)
    engine = tiny_engine(config, context)
    engine.train(True)
    return engine, context


def test_record_by_hand() -> None:
    nothing = torch.zeros(4, dtype=torch.int64)
    record = StepRecord(
        lm_sum=12.0,
        tokens=4.0,
        micro_batches=2,
        losses={"switch_balance": 4.4},
        layers={
            number: LayerRecord(nothing, nothing, nothing, loss_weights={"switch_balance": 0.1})
            for number in (1, 12)
        },
        grad_norm=1.5,
    )
    assert record.metrics() == pytest.approx(
        {
            "train/lm_loss": 3.0,
            "train/loss": 3.22,  # the weighted losses are a mean over micro batches, a sum over layers
            "train/switch_balance": 1.1,  # the mean of 2 layers x 2 micro batches
            "train/switch_balance/weighted": 0.22,  # its share of train/loss
            "train/grad_norm": 1.5,
        }
    )


def test_record_takes_in_micro_batches(one_rank: None) -> None:
    """Losses are summed over layers and micro batches, by name and weighted; counts over micro batches."""

    def seen(load: list[int], balance: float, entropy: float = 1.0) -> Observation:
        observation = Observation(
            torch.tensor(load),
            torch.tensor(load) + 1,
            {"balance": torch.tensor(balance)},
            torch.tensor([0, load[0], load[1]]),
            torch.tensor(entropy),
            torch.tensor(0.5),
        )
        return observation

    sums = StepSums()
    two = torch.tensor(2.0)
    for layers in (
        {1: seen([1, 2], 1.0), 3: seen([3, 0], 2.0)},
        {1: seen([5, 5], 4.0, entropy=0.25), 3: seen([0, 1], 8.0)},
    ):
        sums.add(layers, {number: {"balance": 0.5} for number in layers}, LossSums(torch.tensor(2.5), two))
    tau = {"scorer/temperature": torch.tensor([0.5, 0.25], dtype=torch.float64)}
    record = sums.record(copies=2, part_metrics=tau, compute_seconds=0.5)
    assert record.compute_seconds_R == [0.5] and record.tokens == 2.0  # a rank's own, not one of two copies
    record = sums.record(copies=1, part_metrics=tau)
    assert (record.lm_sum, record.tokens, record.micro_batches) == (5.0, 4.0, 2)
    assert (record.losses, record.weighted_sum("balance")) == ({"balance": 15.0}, 7.5)
    assert [(n, layer.load_E.tolist()) for n, layer in record.layers.items()] == [(1, [6, 7]), (3, [3, 1])]
    assert record.layers[1].wanted_E.tolist() == record.wanted_on_device[1].tolist() == [8, 9]
    assert record.layers[3].width_D.tolist() == [0, 3, 1]
    assert [layer.losses for layer in record.layers.values()] == [{"balance": 5.0}, {"balance": 10.0}]
    assert [(layer.entropy, layer.top_1) for layer in record.layers.values()] == [(1.25, 1.0), (2.0, 1.0)]
    assert [it.part_metrics["scorer/temperature"] for it in record.layers.values()] == [0.5, 0.25]


def test_token_index_follows_the_order_of_a_block() -> None:
    """Position by position: token s * B + b of the block is token s of sequence b."""
    tokens_BS = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = replace(BATCHES[0], tokens_BS=tokens_BS, sample_index_B=torch.tensor([6, 7]))
    context = StepContext()
    context.batch = micro_batch_of(batch, 5)
    assert context.token_index(6, torch.device("cpu")).tolist() == [18, 21, 19, 22, 20, 23]
    assert context.token_ids_T is not None and context.token_ids_T.tolist() == [1, 4, 2, 5, 3, 6]
    assert context.sequence(6, torch.device("cpu")).tolist() == [0, 1, 0, 1, 0, 1]
    assert context.micro_batch == 5


def without_padding(context: StepContext) -> StepContext:
    return context.with_batch(context.batch.without_padding(1))


def test_positions_are_those_of_the_model() -> None:
    """From 0 in each document; without padding, which no part sees; the encoder's are its own."""
    cpu = torch.device("cpu")
    position_ids_BS = torch.tensor([[0, 1, 0], [0, 1, 2]])  # the first row has two documents
    batch = replace(
        BATCHES[0], tokens_BS=torch.tensor([[1, 2, 3], [4, 5, 6]]), position_ids_BS=position_ids_BS
    )
    batch = replace(batch, source_BL=torch.zeros(2, 4).long(), source_lengths_B=torch.tensor([4, 2]))
    context = StepContext()
    context.batch = micro_batch_of(batch, 5)
    assert context.position(6, cpu).tolist() == [0, 0, 1, 1, 0, 2]
    source = context.of_source()
    assert source.batch.padding is not None
    assert source.position(8, cpu).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert without_padding(source).position(6, cpu).tolist() == [0, 0, 1, 1, 2, 3]
    context.batch = micro_batch_of(replace(batch, lengths_B=torch.tensor([1, 3])), 5)
    assert context.batch.padding is not None
    assert without_padding(context).position(4, cpu).tolist() == [0, 0, 1, 2]
    plain = context.with_batch(replace(context.batch, position_T=None))
    assert plain.position(6, cpu).tolist() == [0, 0, 1, 1, 2, 2]
    assert without_padding(plain).position(4, cpu).tolist() == [0, 0, 1, 2]


def test_every_rollout_of_a_sequence_draws_for_itself() -> None:
    tokens_BS = torch.tensor([[1, 2], [4, 5]])
    batch = replace(BATCHES[0], tokens_BS=tokens_BS, sample_index_B=torch.tensor([6, 7])).repeat(2)
    context = StepContext()
    context.batch = micro_batch_of(batch, 5, 2)
    assert batch.tokens_BS.tolist() == [[1, 2], [4, 5], [1, 2], [4, 5]]
    second = 1 << 48
    expected = [12, 14, second + 12, second + 14, 13, 15, second + 13, second + 15]
    assert context.token_index(8, torch.device("cpu")).tolist() == expected
    assert (context.micro_batch, context.num_rollouts, context.num_sequences) == (5, 2, 4)


def reference_step(config: RunConfig, batches: list[Batch], lr: float) -> tuple[GPT, float, float]:
    """The same step in plain PyTorch: (updated model, lm loss, gradient norm before clipping)."""
    context = StepContext(aux_scale=0.0)  # the auxiliary gradient takes the plain road below
    model = tiny_gpt(config, context).train()
    routings: list[tuple[Any, object]] = []
    for _, layer in model.moe_layers():
        losses = layer.losses
        layer.router.register_forward_hook(lambda *call, losses=losses: routings.append((losses, call[-1])))
    losses_NBS = torch.stack([model(**model_inputs(batch)) for batch in batches])
    mask_NBS = torch.stack([batch.loss_mask_BS for batch in batches])
    lm_loss = (losses_NBS * mask_NBS).sum() / mask_NBS.sum()
    total = lm_loss
    for losses, routing in routings:
        for name, loss in losses.items():
            total = total + WEIGHTS[name] * loss(routing, context) / len(batches)
    total.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
    groups = parameter_groups(model, config.optimizer)
    optimizer = torch.optim.AdamW(groups, **adamw_options(config.optimizer))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return model, float(lm_loss.detach()), float(norm)


@pytest.mark.parametrize(
    "overrides", [("moe.layers=none",), ("moe.layers.every=2", LOSSES)], ids=["dense", "moe"]
)
def test_step_is_masked_mean_and_one_clipped_adamw_update(one_rank: None, overrides: tuple[str, ...]) -> None:
    config = tiny(*overrides, "optimizer.grad_clip=0.1")
    engine, context = engine_of(config)
    expected, lm_loss, norm = reference_step(config, BATCHES, lr=0.01)
    record = train_step(engine, context, BATCHES, lr=0.01, label_smoothing=0.0)
    assert record.tokens == 15
    assert record.lm_loss == pytest.approx(lm_loss, rel=1e-6)
    assert norm > 0.1 and record.grad_norm == pytest.approx(norm, rel=1e-5)
    found = dict(engine.model.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


def test_auxiliary_losses_are_means_over_micro_batches(one_rank: None) -> None:
    config = tiny(LOSSES, "moe.router.capacity={name: per_expert, factor: 0.5, min_capacity: 0}")
    engine, context = engine_of(config)
    model = tiny_gpt(config)
    values: dict[str, list[float]] = {"switch_balance": [], "z_loss": []}
    for batch in BATCHES:
        model(**model_inputs(batch))
        for _, layer in model.moe_layers():
            assert layer.observation is not None
            for name, value in layer.observation.losses.items():
                values[name].append(float(value))
    record = train_step(engine, context, BATCHES, lr=0.01, label_smoothing=0.0)
    metrics = record.metrics()
    means = {name: sum(found) / 4 for name, found in values.items()}
    assert {name: metrics[f"train/{name}"] for name in means} == pytest.approx(means, rel=1e-6)
    # Two layers' losses are added.
    weighted = {f"train/{name}/weighted": 2 * WEIGHTS[name] * mean for name, mean in means.items()}
    assert {name: metrics[name] for name in weighted} == pytest.approx(weighted, rel=1e-6)
    assert metrics["train/loss"] - metrics["train/lm_loss"] == pytest.approx(sum(weighted.values()), rel=1e-5)
    # 16 tokens x 2 choices over 4 experts x 0.5: 4 places an expert, so at most 16 of 32 pairs a micro batch.
    load_E, wanted_E = record.layers[1].load_E, record.layers[1].wanted_E
    assert load_E.max() <= 8 and wanted_E.sum() == 64 and load_E.sum() <= 32


def test_label_smoothing_reaches_the_model(one_rank: None) -> None:
    records = []
    for smoothing in (0.0, 0.2):
        engine, context = engine_of(tiny())
        records.append(train_step(engine, context, BATCHES, lr=0.0, label_smoothing=smoothing))
    assert records[0].lm_loss != records[1].lm_loss


def test_evaluation_weights_tokens_not_batches(one_rank: None) -> None:
    engine, context = engine_of(tiny(LOSSES))
    model = engine.model
    before = [parameter.clone() for parameter in model.parameters()]
    losses_BS: list[Tensor] = [model(**model_inputs(batch)).detach() for batch in BATCHES]
    pairs = zip(losses_BS, BATCHES, strict=True)
    counted = torch.cat([loss[batch.loss_mask_BS > 0] for loss, batch in pairs])
    assert len(counted) == 15
    assert evaluate(engine, context, BATCHES) == pytest.approx({"lm_loss": float(counted.mean())}, rel=1e-6)
    assert model.training
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_evaluation_is_without_dropout(one_rank: None) -> None:
    engine, context = engine_of(tiny("model.hidden_dropout=0.5", "model.attention_dropout=0.5"))
    assert evaluate(engine, context, BATCHES) == evaluate(engine, context, BATCHES)
    losses = [train_step(engine, context, BATCHES[1:], lr=0.0, label_smoothing=0.0).lm_loss for _ in range(2)]
    assert losses[0] != losses[1]


def test_losses_of_multi_token_prediction_are_means_of_their_own(one_rank: None) -> None:
    """Each depth's, over its own unmasked tokens of all micro batches; the weight is divided over depths."""
    config = tiny("moe.layers=none", "model.multi_token_prediction={depth: 2, weight: 0.6}")
    model = tiny_gpt(config)
    lm_sum, tokens, sums_D, counts_D = (torch.zeros(()), torch.zeros(()), torch.zeros(2), torch.zeros(2))
    for batch in BATCHES:
        losses_BS, mask_BS = model(**model_inputs(batch)), batch.loss_mask_BS
        mtp_DBS = model.take_multi_token_losses()
        assert mtp_DBS is not None
        lm_sum, tokens = lm_sum + (losses_BS * mask_BS).sum(), tokens + mask_BS.sum()
        for k in (1, 2):  # position i predicts token i + 1 + k, whose mask stands at i + k
            losses, mask = mtp_DBS[k - 1, :, : 8 - k], mask_BS[:, k:]
            sums_D = sums_D + (losses * mask).sum() * functional.one_hot(torch.tensor(k - 1), 2)
            counts_D[k - 1] += mask.sum()
    assert counts_D.tolist() == [1 + 1 + 7 + 3, 1 + 1 + 6 + 2]
    mtp_D = sums_D / counts_D
    loss = lm_sum / tokens + 0.3 * mtp_D.sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    record = train_step(*engine_of(config), BATCHES, lr=0.0, label_smoothing=0.0)
    assert record.mtp == pytest.approx(mtp_D.tolist(), rel=1e-6)
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert record.grad_norm == pytest.approx(float(norm), rel=1e-5)
    metrics = record.metrics()
    found = [metrics["train/lm_loss/mtp_1"], metrics["train/lm_loss/mtp_2"]]
    assert found == record.mtp and metrics["train/loss"] == record.loss
