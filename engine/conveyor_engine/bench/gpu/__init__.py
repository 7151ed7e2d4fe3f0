"""`python -m conveyor_engine bench --suite gpu`: what is to be measured on a GPU, in stages of a few minutes."""
