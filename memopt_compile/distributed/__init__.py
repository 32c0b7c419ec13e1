"""ZeRO: parameters and optimizer state of which each rank keeps its own part.

`storage` knows what has been sharded, `sharding` does it (`memopt.shard_`), `refusals` says what
cannot be, `agreement` holds the ranks to one sequence of collectives. What a step then communicates,
and when, is decided by passes. Nothing is imported here: DTensor takes a while to load.
"""
