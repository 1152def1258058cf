"""These tests check the simulation's true index: it returns the caches' current contents, evictions included."""

from benchmarks.routing_fleet import BLOCK_SIZE, CachingReplica, Points
from benchmarks.routing_truth import TrueIndex
from serve_app.autoscaling.simulation.simulated_replica import Hardware

HARDWARE = Hardware(step_s=lambda *_: 0.01, kv_tokens=1000, max_num_seqs=8)


def test_the_true_index_knows_all_ingresses_prompts_and_what_was_evicted() -> None:
    replicas = {name: CachingReplica(name, HARDWARE, cache_tokens=2 * BLOCK_SIZE) for name in "ab"}
    index = TrueIndex(replicas)
    asked = Points([11, 22, 33], blocks=[1, 2, 3])
    assert index.deepest(asked) == (0, set())
    replicas["a"].add_blocks([1, 2, 3])
    replicas["b"].add_blocks([1])
    assert index.deepest(asked) == (2, {"a"}), "there is room for two blocks, and the end goes first"
    replicas["a"].add_blocks([7, 8])
    assert index.deepest(asked) == (1, {"b"})
