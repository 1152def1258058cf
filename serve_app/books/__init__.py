"""The books room describes the records of requests: the table of Prometheus series, and the ledger's lines and their check."""
