"""Says which labels fit images, in one step each."""
