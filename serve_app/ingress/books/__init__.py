"""The books write metrics, ledger, traces and receipts; all but the fleet's series are made from exchanges."""
