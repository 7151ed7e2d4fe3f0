"""The ledger: what this gateway holds, for whom, and who loses what if there is no room."""
