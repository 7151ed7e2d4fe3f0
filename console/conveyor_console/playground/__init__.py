"""The page on which a caller tries a service: a form for its task, and the answer of a gateway.

`playground` drives a request: `fields` reads the form, `tasks` builds the request and reads the answer, and `relay`
sends it to a gateway. Called by `app`, which decides who may see the service.
"""
