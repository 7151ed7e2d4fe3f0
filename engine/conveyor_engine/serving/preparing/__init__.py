"""From a body to engine requests, in worker processes with limits of their own."""
