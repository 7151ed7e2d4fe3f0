"""What an InferenceService is: its schema, names, labels and conditions. No I/O; imported by operator and gateway."""
