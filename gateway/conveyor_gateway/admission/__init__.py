"""What may come in: bounded queues, places on engines, bytes in memory."""
