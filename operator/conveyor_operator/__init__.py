"""The operator: turns an InferenceService into its children and keeps them so. Never on a request's path."""
