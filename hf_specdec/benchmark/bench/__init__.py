"""`hf-specdec bench`: a pair beside every other way to decode, in one process and on the same prompts.

`grid` says what is measured, `ways` how `generate` is called, `calls` times one call, `runner` goes through a cell,
`numbers` makes ratios and intervals of the times, `report`, `plots` and `comparing` show them.
"""
