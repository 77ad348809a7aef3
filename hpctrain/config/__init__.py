"""The configuration: a typed schema, one module per group of ``conf/``; composition; checks across groups."""
