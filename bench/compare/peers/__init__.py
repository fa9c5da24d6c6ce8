"""Systems that run the same checkpoint; the folder is the registry. Each runs in a process of its
own.

`PEERS` of a module has a `System` by name; the names begin with the name of the module.
"""
