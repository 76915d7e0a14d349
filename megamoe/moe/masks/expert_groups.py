"""Groups of neighbouring experts: the clusters of MoEC, the devices and nodes of DeepSeek.

Group g of G holds the experts g*E/G to (g+1)*E/G - 1.
"""

from torch import Tensor

from megamoe.config.schema import MoEConfig


def by_group(values_TE: Tensor, num_groups: int) -> Tensor:
    """Reshape [T, E] to [T, G, E/G], as a view if the strides allow it."""
    return values_TE.unflatten(1, (num_groups, values_TE.shape[1] // num_groups))


def check_groups(num_groups: int, moe: MoEConfig) -> None:
    """Raise ValueError unless the groups have one size."""
    if moe.num_experts % num_groups:
        legal = [n for n in range(2, moe.num_experts + 1) if moe.num_experts % n == 0]
        raise ValueError(
            f"num_groups is {num_groups}, which does not divide the {moe.num_experts} experts "
            f"(moe.num_experts); choose one of {', '.join(map(str, legal))}"
        )


def check_clusters(cluster_size: int, moe: MoEConfig, expert_parallel: int) -> None:
    """Raise ValueError unless clusters divide the experts and each cluster is on one rank, as in MoEC."""
    if moe.num_experts % cluster_size:
        raise ValueError(
            f"cluster_size is {cluster_size}, which does not divide the {moe.num_experts} experts "
            "(moe.num_experts); choose one that does"
        )
    if moe.num_experts % (cluster_size * expert_parallel):
        raise ValueError(
            f"cluster_size is {cluster_size}, but parallel.expert {expert_parallel} puts "
            f"{moe.num_experts / expert_parallel:g} experts on a rank and would cut a cluster, which MoEC "
            "keeps on one; choose a cluster_size that divides the experts of a rank, or fewer ranks"
        )
