"""The InferenceService: its desired and observed children, the plan of steps, and its status.

The loop uses it through `resource`. All modules are pure, except for `resource`, `case` and `profiles`.
"""
