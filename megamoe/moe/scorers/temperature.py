"""The temperature of cosines (Chi et al. 2022, X-MoE, appendix A)."""


def default_temperature(score_function: frozenset[str]) -> float:
    """Return tau_0: 0.07 for an elementwise score function (sigmoid), 0.3 for others (softmax).

    score_function: what it provides, see `Dims`.
    """
    return 0.07 if "elementwise" in score_function else 0.3
