"""strictly_balanced and its loss: eq. 16 to 20 of Shazeer et al. cell by cell; thresholds that learn."""

from typing import Any

import pytest
import torch

from tests.support.moe.build import loss_of, make_hidden, make_layer, moe_config

TOKENS, EXPERTS, K = 24, 8, 2
TREE = {
    "num_experts": EXPERTS,
    "router": {"selector": {"name": "strictly_balanced", "k": K}},
    "losses": {"batchwise_threshold": {"weight": 1.0}},
}


def test_masks_weights_and_loss_are_those_of_the_paper() -> None:
    layer = make_layer(moe_config(**TREE))
    router: Any = layer.router
    with torch.no_grad():
        router.selector.threshold += torch.linspace(-0.1, 0.3, EXPERTS)
    for training in (True, False):
        routing = router.train(training)(make_hidden(TOKENS), layer.context)
        x, t = routing.probs_TE.tolist(), router.selector.threshold.tolist()
        cells = [(j, i) for j in range(TOKENS) for i in range(EXPERTS)]
        least = [sorted(row[i] for row in x)[-TOKENS * K // EXPERTS] for i in range(EXPERTS)]
        above = {(j, i): x[j][i] > t[i] for j, i in cells}
        mask = {(j, i): x[j][i] >= least[i] for j, i in cells} if training else above
        total = [sum(x[j][i] * mask[j, i] for i in range(EXPERTS)) for j in range(TOKENS)]
        gate = {(j, i): x[j][i] / total[j] for j, i in cells if mask[j, i]}
        pairs = zip(routing.wanted.token_N.tolist(), routing.wanted.expert_N.tolist(), strict=True)
        assert dict(zip(pairs, routing.wanted.weight_N.tolist(), strict=True)) == pytest.approx(gate)
        loss = sum((above[j, i] - mask[j, i]) * (x[j][i] - t[i]) for j, i in cells) / TOKENS
        assert loss_of("batchwise_threshold", routing).item() == pytest.approx(loss)
        assert (loss > 0.01) == training


def test_the_thresholds_learn_the_masks() -> None:
    layer, hidden_TH, agreement = make_layer(moe_config(**TREE)), make_hidden(200), []
    router: Any = layer.router
    torch.nn.init.zeros_(router.selector.threshold)
    optimizer = torch.optim.SGD([router.selector.threshold], lr=0.02)
    for _ in range(101):
        chosen = [router.train(mode)(hidden_TH, layer.context).wanted for mode in (False, True)]
        below, of_batch = ({*zip(w.token_N.tolist(), w.expert_N.tolist(), strict=True)} for w in chosen)
        agreement.append(len(below & of_batch) / len(below | of_batch))
        optimizer.zero_grad()
        (layer(hidden_TH) * 0).sum().backward()
        optimizer.step()
    assert agreement[0] == K / EXPERTS and agreement[-1] > 0.95
