"""Parts and presets of further papers: what neither the project's five papers nor a recipe needs.

They use what a plugin may use: `megamoe.moe.part`, `megamoe.moe.routing`, `megamoe.objectives.objective`,
`megamoe.registry`, the base classes and helpers beside the core's parts, and the passes of `megamoe.kernels`.
The core imports none of them; the registry finds them like its own parts.
"""
