"""What is to be measured on a GPU, in stages of a few minutes."""
