"""How many replicas and ingresses there should be: what is measured, what is decided, and why. See docs/autoscaling.md."""
