"""What the API process and the engine process say to each other: requests and messages. Plain data."""
