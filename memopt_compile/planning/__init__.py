"""Which operators run again and which values are packed, so that a step fits a budget: `planner` decides."""
