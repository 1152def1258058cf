"""The planning room plays traffic on simulated fleets in virtual time, before there is a GPU: `serve-app plan` prints what it finds.

`virtual_fleet.py` has real engine cores of vLLM's behind real ingress cores, with the step times and links of the simulated accelerator.
`engines.py` makes the engine cores, `trace.py` reads traffic, `comparison.py` compares replicas that do everything with those whose prefill
and decode are apart, `verdict.py` judges, and `plot.py` draws. Benchmarks play their own loads on the same fleets.
"""
