"""The InferenceService: its desired and observed children, the plan of steps, and its status. Pure, except for `case`.

The loop uses it through `resource`.
"""
