"""The books room holds what others read of requests: Prometheus series, and the ledger's lines and their check."""
