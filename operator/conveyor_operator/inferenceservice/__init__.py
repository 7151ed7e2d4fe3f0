"""The InferenceService: what it asks for, what is there, what to do next, what its status says. Pure but for `case`.

`resource` is its face to the loop.
"""
