"""Rewrites a client's JSON schema (draft 2020-12 and older) as a schema that `text.grammar` can follow.

`prepare` is the entry. `document` resolves references, `rewrite` replaces keywords, and the modules of single keywords
express them by others: `objects`, `arrays`, `strings`, `numbers` and `choices`, with the complements of `negate`.
`prune` removes what no finite value fits. Pure: no module imports the library that compiles grammars.
"""
