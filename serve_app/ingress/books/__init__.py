"""The books read exchanges and write metrics, ledger, traces and receipts."""
