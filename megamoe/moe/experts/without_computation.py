"""Experts without computation: the token itself, nothing, or a mixture of the token and a learned vector."""

import torch
from torch import Tensor, nn

from megamoe.config.schema import ZeroExpertsConfig
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.token_sharding import TokenSharding


class NoZeroExperts(nn.Module):
    """Stands in a layer all of whose experts compute."""

    def split(
        self, routing: Routing, context: StepContext, token_sharding: TokenSharding
    ) -> tuple[Routing, Routing, Routing]:
        """Return the routing, and twice this rank's part of it; see `ZeroExperts`."""
        own = token_sharding.local_shard(routing, context)
        return routing, own, own

    def forward(self, hidden_TH: Tensor, routing: Routing, output_TH: Tensor) -> Tensor:
        """Return the output."""
        return output_TH


class ZeroExperts(nn.Module):
    """The Z experts after the E that compute: identity, zero, then constant ones.

    identity   E(x) = x
    zero       E(x) = 0
    constant   E(x) = a x + b v, [a, b] = softmax(W x), with W [2, H] and v [H] of each expert

    All are computed where the token is, as one weighted sum in fp32. A token's weight of an expert that it
    did not choose is 0. mix_std, std, init_scale: of the initial W and v, see `rng.init_weight`; they depend
    on (seed, layer, the expert's number) alone.

    Source: Jin et al. 2024 (MoE++, arXiv 2410.07348), section 3.1; LongCat-Flash (Meituan 2025): identity.
    """

    def __init__(
        self,
        config: ZeroExpertsConfig,
        num_experts: int,
        hidden_size: int,
        *,
        std: float,
        mix_std: float,
        init_scale: float | None,
        seed: int,
        layer: int,
    ) -> None:
        super().__init__()
        self.num_experts, self.kinds = num_experts, config
        if config.constant:
            self.mix = nn.Parameter(torch.empty(config.constant, 2, hidden_size))
            self.vector = nn.Parameter(torch.empty(config.constant, hidden_size))
            for number in range(config.constant):
                for weight, name, of in ((self.mix, "mix", mix_std), (self.vector, "vector", std)):
                    key = rng.key(seed, 0, layer, f"constant expert {number}, {name}")
                    rng.init_weight(weight.data[number], key, of, init_scale)

    def split(
        self, routing: Routing, context: StepContext, token_sharding: TokenSharding
    ) -> tuple[Routing, Routing, Routing]:
        """Return the routing to the experts that compute; this rank's part of `routing`; and of that."""
        computing = routing.of_first_experts(self.num_experts)
        own = token_sharding.local_shard(routing, context)
        return computing, own, token_sharding.local_shard(computing, context)

    def forward(self, hidden_TH: Tensor, routing: Routing, output_TH: Tensor) -> Tensor:
        """Return the output with that of these experts, [T, H]; routing: of the same tokens, all pairs."""
        weight_TZ = self._weights(routing)
        kinds = self.kinds
        of_token_T = weight_TZ[:, : kinds.identity].sum(1)
        added_TH = of_token_T[:, None] * hidden_TH
        if kinds.constant:
            weight_TC = weight_TZ[:, kinds.identity + kinds.zero :]
            mix_TC2 = torch.einsum("th,cmh->tcm", hidden_TH.float(), self.mix.float()).softmax(-1)
            token_TC, vector_TC = (weight_TC[..., None] * mix_TC2).unbind(-1)
            added_TH = added_TH + token_TC.sum(1)[:, None] * hidden_TH + vector_TC @ self.vector.float()
        return (output_TH + added_TH).to(output_TH.dtype)

    def _weights(self, routing: Routing) -> Tensor:
        """Return each token's weights of these experts, fp32 [T, Z]; 0 for those that it did not choose.

        It never waits for the device: the weights of the other experts go to a place that is cut off.
        """
        tokens, total, pairs = routing.num_tokens, self.kinds.total, routing.pairs
        expert_N = pairs.expert_N - self.num_experts
        place_N = torch.where(expert_N < 0, tokens * total, pairs.token_N * total + expert_N)
        flat = pairs.weight_N.new_zeros(tokens * total + 1).scatter_add(0, place_N, pairs.weight_N)
        return flat[:-1].view(tokens, total)
