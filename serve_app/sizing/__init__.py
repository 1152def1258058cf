"""The sizing room computes what a model needs before any GPU is there: memory, GPUs, pods, nodes, replicas and their price.

`serve-app fit` prints the results, and `serve-app check` takes its note about memory from here. Nothing here asks a network, a GPU or
vLLM. `checkpoint_files.py` alone reads files; all other modules are pure. `architecture.py` reads a config.json, `stages.py` divides a
model, `weights.py` and `kv_memory.py` count bytes, `fits.py` puts both on an accelerator, `nodes.py` knows pods and AWS instances,
`rate.py` counts replicas.
"""
