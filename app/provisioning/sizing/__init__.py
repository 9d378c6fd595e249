"""Requirements of a model by its config.json: parameters, memory, and the GPUs on which it fits.

Pure arithmetic, without weights, torch or a GPU. `config_file.read_config` gives the facts of a
model, `fit.plan` their consequences on GPUs. docs/plan.md has the formulas and their sources.
"""
