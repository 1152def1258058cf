"""The autoscaler measures the load and decides on the number of replicas and ingresses. docs/autoscaling.md describes it."""
