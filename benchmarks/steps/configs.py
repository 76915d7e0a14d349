"""The two configurations that are trained: the MoE model's and the dense one's."""

from dataclasses import dataclass

from megamoe.config import RunConfig, load_config
from megamoe.config.shapes import expert_ffn_size, shared_ffn_size
from megamoe.errors import UserError, raise_first
from megamoe.moe.router import mean_choices
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.run import validate


@dataclass(frozen=True)
class Asked:
    """What the user asked for. overrides: of the YAML at `config`, the shape's before the user's own."""

    config: str
    overrides: list[str]
    ranks: int = 1

    def moe_and_dense(self, steps: int, output: str) -> dict[str, RunConfig]:
        """For so many steps at a constant rate on mock data; the dense FFN is of equal active FLOPs.

        Over several ranks the batch stays; each has its part of a micro batch, and of the experts.

        Raises:
            UserError: if the configuration is wrong, or does not divide over the ranks.
        """
        common = ["data.mock=true", f"output={output}", "data.workers=0", "evaluation.batches=0"]
        common += ["optimizer.schedule=constant", f"parallel.expert={self.ranks}"]
        overrides = [*common, *self.overrides, f"train.steps={steps}"]
        if self.ranks > 1:
            overrides += self._divided(load_config(self.config, overrides))
        moe = load_config(self.config, overrides)
        width = f"model.ffn_hidden_size={active_ffn_size(moe)}"
        whole = ["parallel.expert=1", "parallel.expert_tensor=1"]
        dense = load_config(self.config, [*overrides, "moe.layers=none", width, *whole])
        for config in (moe, dense):
            raise_first(validate(config, self.ranks, resolve_parallel(config, self.ranks)))
        return {"moe": moe, "dense": dense}

    def _divided(self, config: RunConfig) -> list[str]:
        """Return the overrides that leave the batch as it is."""
        size = config.train.micro_batch_size
        data = max(1, self.ranks // config.parallel.tensor)
        if size % data:
            raise UserError(f"--ranks: {data} data-parallel ranks do not divide a micro batch of {size}")
        batch = config.train.global_batch_size or size
        return [f"train.micro_batch_size={size // data}", f"train.global_batch_size={batch}"]


def active_ffn_size(config: RunConfig) -> int:
    """Return the FFN size of the dense model: that of the chosen and the shared experts together."""
    routed = mean_choices(config.moe) * config.moe.expert_sublayers
    size = expert_ffn_size(config)
    return round(routed * size + shared_ffn_size(config.moe, size))
