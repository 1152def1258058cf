"""Tests on a real Kubernetes cluster; `make test-cluster` runs them. Files run in the order of their numbers and share one release."""
