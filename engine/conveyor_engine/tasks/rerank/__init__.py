"""The task that scores how well documents match a query. Each document takes one step."""
