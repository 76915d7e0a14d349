"""Parts and presets of further papers, and hierarchical mixtures (Shazeer et al. 2017, appendix B).

Neither the routers of X-MoE, MoEC, XMoE, Switch, DeepSeek, Hash and BASE nor a recipe needs them.

They use what a plugin may use: `megamoe.moe.part`, `megamoe.moe.routing`, `megamoe.objectives.objective`,
`megamoe.registry`, the base classes and helpers beside the core's parts, and the passes of `megamoe.kernels`.
The core imports none of them; the registry finds them like its own parts.
"""
